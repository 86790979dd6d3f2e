"""The strategies to search, and the possible settings of each on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plan.planning import resolve_training
from paceline.spec.values import LOCAL_STRATEGIES
from paceline.tune.local.search_space import local_requests
from paceline.tune.spaces import Space, Target, space_of

if TYPE_CHECKING:
    from paceline.spec import Experiment, LocalStrategy, TuneSettings, WorkloadRequest


def searched_strategies(experiment: Experiment, settings: TuneSettings) -> list[LocalStrategy]:
    """Return the strategies of [tune], else those of the trials; all if a trial requests the best
    one."""
    if settings.strategies is not None:
        return [s for s in LOCAL_STRATEGIES if s in settings.strategies]
    named = {trial.local_strategy for trial in experiment.trials}
    return [s for s in LOCAL_STRATEGIES if s in named or "best" in named]


def strategy_space(
    short: Experiment,
    workload: WorkloadRequest,
    strategy: LocalStrategy,
    dataset: str,
    *,
    cores: int,
    settings: TuneSettings,
) -> Space:
    """Return every division of this node's cores that the planner accepts."""
    batch = resolve_training(short, workload, dataset).global_batch
    oversubscribe = settings.oversubscribe or any(
        t.oversubscribe for t in short.trials if t.local_strategy in (strategy, "best")
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
