"""Refuse configurations that cannot train a user's task, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.extensions import TRANSPORTS
from paceline.spec.own_task import workload_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.descriptors import OptionModel, StrategyDescriptor
    from paceline.spec.models import TrialRequest, WorkloadRequest
    from paceline.spec.values import BatchNorm


def batch_norm_faults(request: WorkloadRequest, batch_norm: BatchNorm) -> Iterator[str]:
    """Yield why a model cannot normalise within each replica."""
    if batch_norm == "per-replica" and not workload_of(request).facts().batch_norms:
        yield (
            f"batch_norm: {workload_of(request).model} has no batch normalisation, so "
            '"per-replica" has no meaning; remove it'
        )


def checkpointing_faults(request: WorkloadRequest, *, requested: bool) -> Iterator[str]:
    """Yield why activations of a model cannot be computed again in segments."""
    workload = workload_of(request)
    if requested and workload.needs_facts:
        fault = workload.facts().splitting_fault
        if fault is not None:
            yield f"activation_checkpointing: it needs the blocks of the model, but {fault}"


def undivided_for_batch_norm(
    request: WorkloadRequest,
    strategy: StrategyDescriptor,
    trial: TrialRequest,
    options: OptionModel,
) -> OptionModel:
    """Return the options without micro-batches if the task's model normalises over the batch and
    the trial does not request their number."""
    workload = workload_of(request)
    if workload.needs_facts and strategy.is_pipelined and workload.facts().batch_norms:
        return strategy.undivided(trial, options)
    return options


def task_faults(
    request: WorkloadRequest, strategy: StrategyDescriptor, transport: str, options: Any
) -> Iterator[str]:
    """Yield why a strategy cannot train the task."""
    workload = workload_of(request)
    if not workload.needs_facts:
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
