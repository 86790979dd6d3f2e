"""Refuse configurations that cannot train a user's task, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.extensions import TRANSPORTS
from paceline.spec.own_task import OwnTask, workload_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.descriptors import StrategyDescriptor
    from paceline.spec.models import WorkloadRequest


def own_task_faults(
    request: WorkloadRequest, strategy: StrategyDescriptor, transport: str, options: Any
) -> Iterator[str]:
    """Yield why a strategy cannot train the user's task; nothing for a workload of a package."""
    workload = workload_of(request)
    if not isinstance(workload, OwnTask):
        return
    facts = workload.facts()
    if strategy.is_pipelined and facts.splitting_fault is not None:
        yield f'local_strategy "{strategy.name}": {facts.splitting_fault}'
    if strategy.divides_updates(transport, options) and facts.sharding_fault is not None:
        yield (
            f'local_strategy "{strategy.name}" divides the update of {workload.model} among '
            f"workers, but {facts.sharding_fault}; or use a strategy and transport in which each "
            "replica updates all parameters"
        )
    micro_batches = getattr(options, "micro_batches", 1)
    if facts.batch_norms and micro_batches > 1:
        yield (
            f"micro_batches: layer {facts.batch_norms[0]} of {workload.model} normalises over the "
            f"whole batch, so expected 1, got {micro_batches}"
        )
    if facts.batch_norms and getattr(options, "averaging", None) is not None:
        yield (
            f"averaging_period_steps: layer {facts.batch_norms[0]} of {workload.model} has running "
            "statistics, which local SGD does not average; remove one of the two"
        )
    if TRANSPORTS.get(transport).averages_weights and facts.optimizer != "SGD":
        yield (
            f'transport "{transport}" averages weights and the momentum of SGD; {workload.model} '
            f"has the optimiser {facts.optimizer}; use another transport"
        )
