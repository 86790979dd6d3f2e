"""`paceline tune local`: the search on this node, from a spec to its tuned form.

A search has a run directory like any run: every short trial lies in it and can be compared. What
has an outcome there is not measured again, so a search that was cut at any moment goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.analysis.reading import load_trial
from paceline.errors import NotComparable, UsageError
from paceline.records.files import write_json, write_text
from paceline.records.layout import RunFiles
from paceline.records.machine import usable_cores
from paceline.runner import (
    Planned,
    check_run_dir,
    expected_dataset,
    make_datasets,
    manifest_of,
    only_runner,
    preflight,
)
from paceline.spec import TrialRequest, TuneSettings, load_spec
from paceline.spec.cut_places import CUT_PLACES
from paceline.tune.candidates import (
    StrategySpace,
    baseline_trial,
    plan_one,
    repeated,
    searched_strategies,
    short_experiment,
    strategy_space,
)
from paceline.tune.findings import Findings, findings_of
from paceline.tune.measuring import NodeBench
from paceline.tune.search import Contest, search
from paceline.tune.space import neighbouring_cuts
from paceline.tune.tuned import layout_of, tuned_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.plan.trial import Trial
    from paceline.runner import Progress
    from paceline.spec import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """What a search would measure."""

    experiment: Experiment
    spec_text: str
    settings: TuneSettings
    short: Experiment  # with the steps of a search
    cores: int
    datasets: Mapping[str, Path]
    baselines: Mapping[str, Trial]  # by workload
    spaces: tuple[StrategySpace, ...]


def plan_search(spec: str) -> SearchPlan:
    """What `tune_local` would do; makes nothing, needs no data set to exist yet."""
    experiment, text = load_spec(spec)
    datasets = {str(w.name): expected_dataset(experiment, w) for w in experiment.workloads}
    return _plan(experiment, text, datasets)


def tune_local(
    spec: str,
    run_dir: Path,
    *,
    resume: bool,
    progress: Progress,
    budget_s: float | None = None,
) -> Findings:
    """Search, and write `tuned.toml` and `tuning.json` into `run_dir`.

    budget_s: no short trial starts later than that, instead of [tune] timeout_s.
    Raises UsageError, EnvironmentLacks or DataError before anything runs; RankFailed or TimedOut if
    a baseline fails, NotComparable if no candidate could be measured. Other candidates may fail:
    they are named.
    """
    experiment, text = load_spec(spec)
    files = RunFiles(run_dir)
    check_run_dir(files, experiment, text, resume=resume)
    plan = _plan(experiment, text, make_datasets(experiment, progress))
    preflight(trial for space in plan.spaces for trial in space.candidates)
    run_dir.mkdir(parents=True, exist_ok=True)
    with only_runner(run_dir):
        if not files.manifest.exists():
            write_json(files.manifest, manifest_of(_as_planned(plan)))
        return _search(plan, files, progress, budget_s or plan.settings.timeout_s)


def _plan(experiment: Experiment, text: str, datasets: Mapping[str, Path]) -> SearchPlan:
    settings = experiment.tune or TuneSettings()
    short, cores = short_experiment(experiment, settings), usable_cores()
    baselines: dict[str, Trial] = {}
    spaces: list[StrategySpace] = []
    for workload in short.workloads:
        dataset = str(datasets[workload.name])
        baselines[workload.name] = baseline_trial(short, workload, dataset, cores)
        spaces += [
            strategy_space(short, workload, strategy, dataset, cores=cores, settings=settings)
            for strategy in searched_strategies(experiment, settings)
        ]
    if not any(space.candidates for space in spaces):
        reasons = "".join(
            f"\n  - {s.strategy}: {o.what}: {o.reason}" for s in spaces for o in s.left_out
        )
        raise UsageError(
            f"experiment {experiment.name!r}: nothing to search on this node:{reasons}"
        )
    return SearchPlan(
        experiment=experiment,
        spec_text=text,
        settings=settings,
        short=short,
        cores=cores,
        datasets=datasets,
        baselines=baselines,
        spaces=tuple(spaces),
    )


def _as_planned(plan: SearchPlan) -> Planned:
    """For the manifest: the baselines and the first measurement of every candidate."""
    candidates = [trial for space in plan.spaces for trial in space.candidates]
    first = {t.id: t for t in [*plan.baselines.values(), *candidates]}
    return Planned(
        experiment=plan.experiment,
        spec_text=plan.spec_text,
        datasets=dict(plan.datasets),
        trials=list(first.values()),
    )


def _search(
    plan: SearchPlan, files: RunFiles, progress: Progress, limit_s: float | None
) -> Findings:
    bench = NodeBench(files, plan.baselines, progress, limit_s=limit_s)
    # every other trial is held against the baselines, and they come first
    contests = [Contest([trial], plan.settings) for trial in plan.baselines.values()]
    known = {(c.workload, c.strategy) for c in contests}
    contests += [
        Contest(space.candidates, plan.settings)
        for space in plan.spaces
        if space.candidates and (space.workload, space.strategy) not in known
    ]
    finished, measured = search(
        contests,
        bench,
        lambda contest: _around_the_winner(contest, plan, files),
        seed=plan.experiment.seed,
    )
    findings = findings_of(plan.spaces, finished, measured)
    if all(found.chosen_images_per_s is None for found in findings.strategies):
        raise NotComparable(_nothing_measured(findings, files))
    write_json(files.tuning, findings.to_json())
    write_text(files.tuned_spec, tuned_text(plan.experiment, findings, plan.cores))
    return findings


def _around_the_winner(contest: Contest, plan: SearchPlan, files: RunFiles) -> Contest | None:
    """Once a pipeline has its winner: that, against the cuts beside its own."""
    winner = contest.best
    if contest.follows is not None or winner is None or winner.pipeline is None:
        return None
    record = load_trial(files.trial(repeated(winner, 0).id))
    cuts = [] if record.result is None else record.result.communication.get("cuts", [])
    workload = next(w for w in plan.short.workloads if w.name == contest.workload)
    layout = {k: v for k, v in layout_of(winner).items() if k != "balance"}
    oversubscribe = winner.placement.oversubscribe
    beside = [
        plan_one(
            plan.short,
            workload,
            TrialRequest(
                launcher="local",
                local_strategy=contest.strategy,
                oversubscribe=oversubscribe,
                **{**layout, "cuts": moved},
            ),
            winner.training.dataset,
            plan.cores,
        )
        for moved in neighbouring_cuts(cuts, CUT_PLACES[winner.training.model])
    ]
    return Contest([winner, *beside], plan.settings, follows=contest) if beside else None


def _nothing_measured(findings: Findings, files: RunFiles) -> str:
    failures = (found.failures.values() for found in findings.strategies)
    reasons = {reason.splitlines()[0] for reasons in failures for reason in reasons}
    cut_short = any(found.cut_short for found in findings.strategies)
    listed = "".join(f"\n  - {reason}" for reason in sorted(reasons))
    advice = (
        "allow more time (--budget, or [tune] timeout_s) and add --resume"
        if cut_short
        else (f"the records are in {files.root}")
    )
    return f"{files.root}: no candidate could be measured; {advice}{listed}"
