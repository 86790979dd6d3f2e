"""Explain the difference between two runs: before and after a change, or two versions.

A configuration is compared with itself in the other run. Whether it differs says the test of
`paceline compare RUN_A RUN_B`. Repeats of different runs have nothing in common, so they are not
paired. What the traces do not explain may come from what differs between the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.analysis.between_runs.differences import Difference, run_differences
from paceline.analysis.between_runs.two_runs import tested_pairs
from paceline.analysis.compare.run import Comparison, speed_ranking
from paceline.analysis.explain.evidence import ExplainedTrials
from paceline.analysis.explain.explanation import Explanation, explain
from paceline.base.errors import NotComparable
from paceline.plan.trials.planning import matching, no_match
from paceline.plan.trials.trial import Training

# Values of a training that change the work of a step. The others change how data are read, how
# long the training is, or its result.
_WORK = ("workload", "model", "image_size", "global_batch", "dropout", "options")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRuns:
    """Each configuration of both runs, and what differs between the runs."""

    explanations: tuple[Explanation, ...]  # the largest difference first
    differences: tuple[Difference, ...]
    not_compared: tuple[str, ...]  # configurations with the reason


def explain_runs(
    first: Comparison, second: Comparison, labels: tuple[str, str], pattern: str | None = None
) -> ExplainedRuns:
    """Explain the difference of every configuration that finished in both runs.

    labels: names of the runs. pattern: shell pattern of the configurations; None is all.
    Raises UsageError if the pattern matches none, NotComparable if no configuration is comparable.
    """
    common = [name for name in first.trials if name in second.trials]
    chosen = common if pattern is None else matching(common, pattern)
    if pattern is not None and not chosen:
        raise no_match("configuration of both runs", [pattern], common)
    found, refused = [], []
    for name in chosen:
        trainings = [run.trials[name][0].record.trial.training for run in (first, second)]
        changed = list(_changed_work(*trainings))
        if changed:
            refused.append(f"{name}: a step is other work: {'; '.join(changed)}")
        else:
            found.append(_explained({labels[0]: first, labels[1]: second}, name))
    if not found:
        listed = "".join(f"\n  - {each}" for each in refused)
        raise NotComparable(
            f"{labels[0]}, {labels[1]}: expected a configuration that finished in both runs and "
            f"does the same work in a step, found none{':' if refused else ''}{listed}"
        )
    return ExplainedRuns(
        explanations=tuple(sorted(found, key=lambda each: -each.difference_s.mean / each.faster_s)),
        differences=tuple(run_differences(first.manifest, second.manifest)),
        not_compared=tuple(refused),
    )


def side_name(configuration: str, run: str) -> str:
    """Return the name of a configuration in one of the runs, as an explanation has it."""
    return f"{configuration} in {run}"


def _explained(runs: Mapping[str, Comparison], name: str) -> Explanation:
    sides = [
        ExplainedTrials(side_name(name, label), [trial.record for trial in run.trials[name]])
        for label, run in runs.items()
    ]
    rates = [speed_ranking(run, run.row(name).workload).rates for run in runs.values()]
    log_ratio, is_different = tested_pairs(rates[1], rates[0])[name]
    disturbed = [each.disturbed_repeats(name) for each in rates]
    return explain(
        sides[0],
        sides[1],
        log_ratio.estimate() if log_ratio.has_noise else None,
        paired=False,
        may_differ=is_different,
        disturbed={side.name: each for side, each in zip(sides, disturbed, strict=True)},
    )


def _changed_work(first: Training, second: Training) -> Iterator[str]:
    for key in _WORK:
        ours, theirs = getattr(first, key), getattr(second, key)
        if ours != theirs:
            yield f"{key} {theirs} instead of {ours}"
    scripts = [None if t.script is None else t.script.arguments for t in (first, second)]
    if scripts[0] != scripts[1]:
        yield "arguments of the script"
