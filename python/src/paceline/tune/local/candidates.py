"""The strategies to search, and the possible settings of each on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plan.planning import resolve_training
from paceline.spec.extensions import STRATEGIES
from paceline.spec.values import BEST
from paceline.tune.local.search_space import local_requests
from paceline.tune.spaces import Space, Target, space_of

if TYPE_CHECKING:
    from paceline.spec import Experiment, TuneSettings, WorkloadRequest


def searched_strategies(experiment: Experiment, settings: TuneSettings) -> list[str]:
    """Return the strategies of [tune], else those of the trials; all if a trial requests the best
    one."""
    if settings.strategies is not None:
        return [s for s in STRATEGIES.names() if s in settings.strategies]
    named = {trial.local_strategy for trial in experiment.trials}
    return [s for s in STRATEGIES.names() if s in named or BEST in named]


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
