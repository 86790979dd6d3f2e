"""Search for the fastest settings of each local strategy on this node: alone, or before a run.

`paceline tune local` only searches; `paceline run` for a spec with [tune] then runs the trials with
the winners. Every division of the node's cores that is worth a trial is a candidate. Combinations
that the planner refuses (a batch that is not divisible, more stages than layers) are left out by
`spaces`, with the planner's reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.analysis.trial.reading import load_trial
from paceline.base.errors import UsageError
from paceline.base.host.machine import usable_cores
from paceline.base.host.own_runs import remember_run
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import Outcome
from paceline.plan.spec.extensions import STRATEGIES
from paceline.plan.spec.loading import Spec, load_spec
from paceline.plan.spec.models import Experiment, TrialRequest, TuneSettings, WorkloadRequest
from paceline.plan.spec.rules.trial import batch_per_replica, has_layout
from paceline.plan.spec.values import BEST
from paceline.plan.spec.workloads import workload_of
from paceline.plan.trials.planning import plan_trials, repeated, resolve_training
from paceline.plan.trials.trial import Trial
from paceline.runner.trials import experiment
from paceline.runner.trials.directory import check_run_dir, made_run_dir, recorded_spec
from paceline.runner.trials.planning import Progress, make_datasets
from paceline.runner.trials.preview import preflight
from paceline.runner.tune.search import Findings
from paceline.runner.tune.session import Searched, SearchMethod, plan_search, run_search
from paceline.runner.tune.spaces import BASELINE, SearchContext, SearchTarget, changed, cores_wanted


def _layouts(
    searched: Searched, reached: Trial | None, context: SearchContext
) -> list[TrialRequest]:
    """Return every other division of this node's cores."""
    del reached
    return _requests(searched.target, context)[1:]


def _moved_split_points(
    searched: Searched, reached: Trial | None, context: SearchContext
) -> list[TrialRequest]:
    """Return the measured winner of a pipeline with one split point moved."""
    if reached is None or reached.placement.stages == 1 or context.files is None:
        return []
    record = load_trial(context.files.trial(repeated(reached, 0).id))
    split_points = (
        [] if record.result is None else record.result.communication.get("split_points", [])
    )
    workload = workload_of(context.short_workload(searched.target.workload))
    present = changed(searched.request, **_layout_keys(reached))
    return [
        changed(present, balance=None, split_points=moved)
        for moved in neighbouring_split_points(split_points, workload.facts().split_points)
    ]


def _searched(context: SearchContext) -> list[Searched]:
    """Return every strategy on each workload, and the baseline."""
    targets = [
        SearchTarget(workload=workload.name, name=strategy)
        for workload in context.short.workloads
        for strategy in searched_strategies(context.experiment, context.settings)
    ]
    return [Searched(target=t, request=_requests(t, context)[0]) for t in targets]


def _present(request: TrialRequest, reached: Trial) -> TrialRequest:
    return changed(request, **_layout_keys(reached))


def _filled_in(
    request: TrialRequest, workload: WorkloadRequest, experiment: Experiment, findings: Findings
) -> TrialRequest | None:
    """Return the trial with its strategy's winner, or with the best strategy; None if there is
    none."""
    if request.local_strategy == BEST:
        found = findings.best(workload.name)
        if found is None:
            return None
    else:
        found = findings.of(SearchTarget(workload=workload.name, name=request.local_strategy))
    chosen = None if found is None else found.chosen
    if chosen is None or has_layout(request):
        return request
    layout = _layout_keys(chosen)
    if "micro_batches" in layout:
        batch = resolve_training(experiment, workload, "").global_batch
        share = batch_per_replica(batch, request.nodes * chosen.placement.replicas_per_node)
        layout["micro_batches"] = min(layout["micro_batches"], share)
    return changed(request, local_strategy=chosen.local_strategy, **layout)


# Targets are strategies on a workload, and the baseline. A pipeline's winner is then compared with
# moved split points.
LOCAL_SEARCH = SearchMethod(
    command="tune local",
    compares_targets=True,
    rounds={"layout": _layouts, "split points": _moved_split_points},
    searched=_searched,
    present=_present,
    filled_in=_filled_in,
)
plan_local = partial(plan_search, LOCAL_SEARCH)
tune_local = partial(run_search, LOCAL_SEARCH)


def searched_strategies(experiment: Experiment, settings: TuneSettings) -> list[str]:
    """Return the baseline's strategy, and those of [tune], else those of the trials.

    If a trial requests the best strategy, these are all that are candidates for it.
    """
    named = {BASELINE.local_strategy}
    if settings.strategies is not None:
        named |= set(settings.strategies)
        return [s for s in STRATEGIES.names() if s in named]
    named |= {trial.local_strategy for trial in experiment.trials}
    return [
        s.name
        for s in STRATEGIES.all()
        if s.name in named or (BEST in named and s.is_candidate_for_best)
    ]


def _requests(target: SearchTarget, context: SearchContext) -> list[TrialRequest]:
    """Return the default of a strategy first, then every other division of this node's cores."""
    workload = context.short_workload(target.workload)
    training = resolve_training(context.short, workload, context.dataset(target.workload))
    oversubscribe = context.settings.oversubscribe or any(
        t.oversubscribe for t in context.short.trials if t.local_strategy in (target.name, BEST)
    )
    return local_requests(
        target.name,
        cores=context.cores,
        batch=training.global_batch,
        oversubscribe=oversubscribe,
    )


def _layout_keys(trial: Trial) -> dict[str, Any]:
    """Return the keys of a [[trials]] entry that give the layout of a trial."""
    shares_cores = {"oversubscribe": True} if trial.placement.oversubscribe else {}
    return {**trial.layout_keys, **shares_cores}


def local_requests(
    strategy: str, *, cores: int, batch: int, oversubscribe: bool
) -> list[TrialRequest]:
    """Return the default first, then every other division of `cores`; some may mean the same trial.

    batch: samples of a step on this node. oversubscribe: more workers than cores are allowed; only
    requests that need it set it.
    """
    layouts: list[dict[str, Any]] = [{}, *STRATEGIES.get(strategy).search_space(cores, batch)]
    requests = [TrialRequest(launcher="local", local_strategy=strategy, **keys) for keys in layouts]
    return [_oversubscribed(r, cores) if oversubscribe else r for r in requests]


def neighbouring_split_points(
    split_points: Sequence[int], possible: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return all variants with one split point moved to the previous or next possible place.

    possible: ascending indexes of layers at which a stage may begin; it contains `split_points`.
    """
    found: list[tuple[int, ...]] = []
    for number, cut in enumerate(split_points):
        place = possible.index(cut)
        beside = (*possible[max(place - 1, 0) : place], *possible[place + 1 : place + 2])
        found += [
            (*split_points[:number], moved, *split_points[number + 1 :])
            for moved in beside
            if moved not in split_points
        ]
    return found


def _oversubscribed(request: TrialRequest, cores: int) -> TrialRequest:
    needed = cores_wanted(request, cores) > cores
    return request.model_copy(update={"oversubscribe": True}) if needed else request


def tune_and_run(
    spec: Spec,
    run_dir: Path,
    *,
    resume: bool,
    progress: Progress,
    keep_going: bool | None = None,
    changed_script: bool = False,
) -> tuple[Findings | None, list[Outcome]]:
    """Search into `run_dir`/tune, then run the tuned spec into `run_dir`.

    Return the findings (None if the search had ended before) and what `experiment.run` returns.
    After the first trial has started the spec no longer changes, so that all trials of a run belong
    to one spec. Raises the errors of `tune_local` and `experiment.run`.
    """
    files = RunFiles(run_dir)
    searched = files.tune.manifest.exists()
    if resume and not searched:
        raise UsageError(
            f"{run_dir}: there is no run to resume ({files.tune.manifest} does not exist); omit "
            "--resume to start one"
        )
    if not searched:
        check_run_dir(files, spec, resume=False)
    check_run_dir(files.tune, spec, resume=resume)
    findings = None
    if not files.manifest.exists():
        datasets = make_datasets(spec.experiment, progress)
        preflight(_smallest_trials(spec.experiment, datasets))
        with made_run_dir(run_dir):
            if not searched:
                remember_run(run_dir)
            findings = tune_local(spec, files.tune.root, resume=resume, progress=progress)
    has_begun = files.manifest.exists()
    failed = experiment.run(
        recorded_spec(run_dir, trust_run=True)
        if has_begun
        else load_spec(str(files.tune.tuned_spec)),
        run_dir,
        resume=has_begun,
        progress=progress,
        keep_going=keep_going,
        changed_script=changed_script,
    )
    return findings, failed


def _smallest_trials(experiment: Experiment, datasets: Mapping[str, str]) -> list[Trial]:
    """Return the smallest trial of every launcher on its number of nodes, so that missing
    prerequisites are found before the search."""
    wanted = dict.fromkeys((t.launcher, t.nodes) for t in experiment.trials)
    smallest = tuple(
        TrialRequest(launcher=launcher, local_strategy="sequential", nodes=nodes)
        for launcher, nodes in wanted
    )
    first = experiment.model_copy(
        update={"trials": smallest, "workloads": experiment.workloads[:1], "repeats": 1}
    )
    return plan_trials(first, datasets, usable_cores())
