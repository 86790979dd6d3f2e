"""Compare two runs: before and after a change, two machines, or two versions.

Rows are paired by the name of the configuration. Repeats of different runs have nothing in common,
so no drift of the machine cancels as it does within a run. Therefore both rates have the spread of
whole runs. All pairs of a workload are tested together. With a single repeat in one of the
runs, nothing can be said. A difference between two runs may still come from the state of the
machine at that time, or from what else differs: packages, git commit, spec, files of the user's
code. An explanation compares a configuration with itself in the other run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.analysis.between_runs.speeds import RunSpeeds
from paceline.analysis.compare.run import Comparison, speed_ranking
from paceline.analysis.explain.evidence import ExplainedTrials
from paceline.analysis.explain.explanation import Explanation, explain
from paceline.analysis.statistics.fastest import differing
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.statistics.model import Belief
from paceline.analysis.statistics.rates import RunRates
from paceline.base.errors import NotComparable
from paceline.plan.spec.values import toml_document
from paceline.plan.trials.planning import matching, no_match
from paceline.plan.trials.trial import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRow:
    """One configuration in two runs."""

    configuration: str
    workload: str
    before: Interval  # samples per second in the first run
    after: Interval  # in the second run
    ratio: Interval  # after / before
    is_different: bool  # significant at 5 % in the family of the workload
    equivalent: tuple[bool | None, bool | None]  # to the baseline of its own run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two runs: rows in both, and configurations in one of them only."""

    rows: tuple[PairedRow, ...]  # the largest ratio first, by workload
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def faster(self) -> list[PairedRow]:
        return [row for row in self.rows if row.is_different and row.ratio.estimate > 1]

    @property
    def slower(self) -> list[PairedRow]:
        return [row for row in self.rows if row.is_different and row.ratio.estimate < 1]


def compare_runs(before: RunSpeeds, after: RunSpeeds) -> RunComparison:
    """Pair the configurations of two runs and test each pair."""
    rows: list[PairedRow] = []
    for workload in before.workloads:
        rows += _paired_rows(workload, before, after)
    return RunComparison(
        rows=tuple(rows),
        only_before=tuple(name for name in before.rates if name not in after.rates),
        only_after=tuple(name for name in after.rates if name not in before.rates),
    )


def paired_differences(before: RunRates, after: RunRates) -> dict[str, Belief]:
    """Return the logarithm of after / before of each configuration that finished in both runs."""
    pairs = ((name, after.log_ratio_to(before, name)) for name in before.repeats)
    return {name: found for name, found in pairs if found is not None}


def tested_pairs(before: RunRates, after: RunRates) -> dict[str, tuple[Belief, bool]]:
    """Return log(after / before) of each configuration in both, and whether it is different."""
    tests = paired_differences(before, after)
    different = differing(tests, 0.0)
    return {name: (found, name in different) for name, found in tests.items()}


def _paired_rows(workload: str, before: RunSpeeds, after: RunSpeeds) -> list[PairedRow]:
    ours, theirs = before.of_workload(workload), after.of_workload(workload)
    rows = []
    for name, (found, is_different) in tested_pairs(ours, theirs).items():
        speeds = ours.rate(name), theirs.rate(name)
        if speeds[0] is None or speeds[1] is None:
            continue
        rows.append(
            PairedRow(
                configuration=name,
                workload=workload,
                before=speeds[0],
                after=speeds[1],
                ratio=found.estimate(is_tested=is_different).exponential(),
                is_different=is_different,
                equivalent=(before.equivalent[name], after.equivalent[name]),
            )
        )
    return sorted(rows, key=lambda row: -row.ratio.estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that differs; None: a run does not have it."""

    of: str  # machine, package, git, spec or file
    name: str
    before: str | None
    after: str | None


def run_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """List what differs between two manifests."""
    return [
        Difference(of=of, name=name, before=ours.get(name), after=theirs.get(name))
        for of, ours, theirs in zip(_KINDS, _facts(before), _facts(after), strict=True)
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name) and (of != _FILE or (ours and theirs))
    ]


def machine_identity(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values that are equal for two runs on the same machine."""
    host = _table(manifest, "host")
    return tuple(str(host.get(name)) for name in _IDENTITY if name != _TURNS or name in host)


_FILE = "file"  # older runs have no checksums of files
_KINDS = ("machine", "package", "git", "spec", _FILE)
_TURNS = "turns"  # of lab hosts; only there
_IDENTITY = ("host", "cpu_model", "usable_cores", _TURNS)


def _facts(manifest: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    packages = _table(manifest, "versions") | _table(manifest, "packages")
    return (
        _strings(_table(manifest, "host")),
        _strings(packages),
        _strings(_table(manifest, "git")),
        _spec(manifest),
        _strings(_table(manifest, "sources")),
    )


def _spec(manifest: Mapping[str, Any]) -> dict[str, str]:
    try:
        spec = toml_document(str(manifest.get("spec_toml", "")))
    except ValueError:
        return {}
    return dict(_flat(spec, ""))


def _flat(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables and arrays of tables with their dotted keys."""
    inner: dict[str, object] = {}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        inner = {str(number): each for number, each in enumerate(value)}
    if not inner:
        yield place, str(value)
    for key, each in inner.items():
        yield from _flat(each, f"{place}.{key}" if place else key)


def _table(manifest: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = manifest.get(key)
    return found if isinstance(found, dict) else {}


def _strings(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in table.items() if value is not None}


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
