"""`paceline tune local`: search for the fastest settings of each local strategy on this node.

Every division of the node's cores that is worth a trial is a candidate. Combinations that the
planner refuses (a batch that is not divisible, more stages than layers) are left out by `spaces`,
with the planner's reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.reading import load_trial
from paceline.plan.planning import repeated, resolve_training
from paceline.spec import TrialRequest
from paceline.spec.counts import batch_per_replica
from paceline.spec.extensions import STRATEGIES
from paceline.spec.tune_rules import has_layout
from paceline.spec.values import BEST
from paceline.spec.workloads import workload_of
from paceline.tune.findings import SCHEMA, Finding, Findings, configuration_of
from paceline.tune.search import Bracket
from paceline.tune.session import plan_search, run_search
from paceline.tune.spaces import (
    Space,
    Target,
    changed,
    cores_wanted,
    plan_one,
    space_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.records.layout import RunFiles
    from paceline.runner import Progress
    from paceline.spec import Experiment, Spec, TuneSettings, WorkloadRequest
    from paceline.tune.method import SearchContext, SearchPlan


class LocalSearch:
    """Targets are strategies on a workload. A pipeline's winner is then compared with moved split
    points."""

    command = "tune local"

    def spaces(self, context: SearchContext) -> list[Space]:
        return [
            strategy_space(
                context.short,
                workload,
                strategy,
                context.datasets.get(workload.name, ""),
                cores=context.cores,
                settings=context.settings,
            )
            for workload in context.short.workloads
            for strategy in searched_strategies(context.experiment, context.settings)
        ]

    def first_bracket(self, space: Space, context: SearchContext) -> Bracket:
        return Bracket(space.target, space.candidates, context.settings)

    def following(self, bracket: Bracket, plan: SearchPlan, files: RunFiles) -> Bracket | None:
        """Return the winner of a pipeline against variants with one split point moved."""
        winner, context = bracket.best, plan.context
        if bracket.follows is not None or winner is None or winner.placement.stages == 1:
            return None
        record = load_trial(files.trial(repeated(winner, 0).id))
        split_points = (
            [] if record.result is None else record.result.communication.get("split_points", [])
        )
        workload = next(w for w in context.short.workloads if w.name == bracket.target.workload)
        layout = {k: v for k, v in winner.layout_keys.items() if k != "balance"}
        beside = [
            plan_one(
                context.short,
                workload,
                TrialRequest(
                    launcher="local",
                    local_strategy=winner.local_strategy,
                    oversubscribe=winner.placement.oversubscribe,
                    **{**layout, "split_points": moved},
                ),
                winner.training.dataset,
                context.cores,
            )
            for moved in neighbouring_split_points(
                split_points, workload_of(workload).facts().split_points
            )
        ]
        if not beside:
            return None
        return Bracket(
            bracket.target,
            [winner, *beside],
            context.settings,
            name="split_points",
            follows=bracket,
        )

    def document(
        self,
        plan: SearchPlan,  # noqa: ARG002  (of any method of search)
        findings: Findings,
        files: RunFiles,  # noqa: ARG002
    ) -> dict[str, Any]:
        best = {name: findings.best(name) for name in findings.workloads}
        return {
            "schema": SCHEMA,
            "strategies": [_strategy_json(found) for found in findings.found],
            "best": {n: None if f is None else configuration_of(f.chosen) for n, f in best.items()},
        }

    def filled_in(
        self,
        request: TrialRequest,
        workload: WorkloadRequest,
        experiment: Experiment,
        findings: Findings,
    ) -> TrialRequest | None:
        """Return the trial with its strategy's winner, or with the best strategy; None if there is
        none."""
        if request.local_strategy == BEST:
            found = findings.best(workload.name)
            if found is None:
                return None
        else:
            found = findings.of(Target(workload=workload.name, name=request.local_strategy))
        chosen = None if found is None else found.chosen
        if chosen is None or has_layout(request):
            return request
        layout = chosen.layout_keys
        if "micro_batches" in layout:
            batch = resolve_training(experiment, workload, "").global_batch
            share = batch_per_replica(batch, request.nodes * chosen.placement.replicas_per_node)
            layout["micro_batches"] = min(layout["micro_batches"], share)
        shares_cores = {"oversubscribe": True} if chosen.placement.oversubscribe else {}
        return changed(request, local_strategy=chosen.local_strategy, **layout, **shares_cores)


def plan_local(spec: Spec) -> SearchPlan:
    """Return what `tune_local` would measure; creates nothing, and needs no existing data set."""
    return plan_search(LocalSearch(), spec)


def tune_local(
    spec: Spec, run_dir: Path, *, resume: bool, progress: Progress, budget_s: float | None = None
) -> Findings:
    """Search into `run_dir`; see `session.run_search`."""
    return run_search(
        LocalSearch(), spec, run_dir, resume=resume, progress=progress, budget_s=budget_s
    )


def _strategy_json(found: Finding) -> dict[str, Any]:
    target = found.target
    return {"workload": target.workload, "local_strategy": target.name, **found.to_json()}


def searched_strategies(experiment: Experiment, settings: TuneSettings) -> list[str]:
    """Return the strategies of [tune], else those of the trials; all that are candidates for the
    best one if a trial requests it."""
    if settings.strategies is not None:
        return [s for s in STRATEGIES.names() if s in settings.strategies]
    named = {trial.local_strategy for trial in experiment.trials}
    return [
        s.name
        for s in STRATEGIES.all()
        if s.name in named or (BEST in named and s.is_candidate_for_best)
    ]


def strategy_space(
    short: Experiment,
    workload: WorkloadRequest,
    strategy: str,
    dataset: str,
    *,
    cores: int,
    settings: TuneSettings,
) -> Space:
    """Return every division of this node's cores that the planner accepts."""
    batch = resolve_training(short, workload, dataset).global_batch
    oversubscribe = settings.oversubscribe or any(
        t.oversubscribe for t in short.trials if t.local_strategy in (strategy, BEST)
    )
    requests = local_requests(strategy, cores=cores, batch=batch, oversubscribe=oversubscribe)
    return space_of(
        Target(workload=workload.name, name=strategy),
        requests,
        short,
        dataset,
        cores=cores,
        settings=settings,
    )


def local_requests(
    strategy: str, *, cores: int, batch: int, oversubscribe: bool
) -> list[TrialRequest]:
    """Return the default first, then every other division of `cores`; some may mean the same trial.

    batch: samples of a step on this node. oversubscribe: more workers than cores are allowed; only
    requests that need it set it.
    """
    layouts: list[dict[str, Any]] = [{}, *STRATEGIES.get(strategy).search_space(cores, batch)]
    requests = [_request(strategy, layout) for layout in layouts]
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


def _request(strategy: str, layout: dict[str, Any]) -> TrialRequest:
    return TrialRequest(launcher="local", local_strategy=strategy, **layout)


def _oversubscribed(request: TrialRequest, cores: int) -> TrialRequest:
    needed = cores_wanted(request, cores) > cores
    return request.model_copy(update={"oversubscribe": True}) if needed else request
