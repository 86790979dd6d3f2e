"""`paceline tune local`: search for the fastest settings of each local strategy on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.reading import load_trial
from paceline.spec import TrialRequest
from paceline.spec.extensions import WORKLOADS
from paceline.tune.findings import SCHEMA, Finding, Findings, configuration_of
from paceline.tune.local.candidates import searched_strategies, strategy_space
from paceline.tune.local.search_space import neighbouring_split_points
from paceline.tune.local.winners import with_layout
from paceline.tune.search import Bracket
from paceline.tune.session import plan_search, run_search
from paceline.tune.spaces import plan_one, repeated

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.records.layout import RunFiles
    from paceline.runner import Progress
    from paceline.spec import Experiment, Spec, WorkloadRequest
    from paceline.tune.method import SearchContext, SearchPlan
    from paceline.tune.spaces import Space


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
                str(context.datasets[workload.name]),
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
                split_points, WORKLOADS.get(workload.name).facts().split_points
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
        return with_layout(request, workload, experiment, findings)


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
