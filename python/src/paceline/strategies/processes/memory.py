"""Predict the memory of replicas in processes that share the weights of their node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.reduction.flat_layout import FlatLayout
from paceline.strategies.reduction.shared_gradients import SharedGradients
from paceline.strategies.reduction.sufficient_factors import (
    SharedFactors,
    capture_sufficient_factors,
    linear_layers,
    mark_summed_layers,
    rows_of,
)
from paceline.training.checkpointing import checkpoint_activations
from paceline.training.heap import followed_by, heap_bytes
from paceline.training.optimizers import trained_parameters
from paceline.training.precision import working_dtype
from paceline.training.step_memory import FakeModel, NodeMemory

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT_BYTES = 4


def node_memory(fake: FakeModel) -> NodeMemory:
    """Return private memory of each rank, and the weights, gradients and factors that they
    share."""
    trial, model = fake.trial, fake.model
    place = trial.placement
    ranks = place.ranks_per_node
    samples = place.samples_of_a_replica(trial.training.global_batch)
    dtype = working_dtype(trial.training)
    checkpoint_activations(fake.task, model, trial)
    mark_summed_layers(model, fake.task.example_input())
    rows, parameters = rows_of(model), trained_parameters(model)
    shards = FlatLayout.of(parameters.items()).shards(ranks, rows)
    summed = [[s for s in own if s.name not in rows] for own in shards]
    counts = dict.fromkeys(linear_layers(model), samples)
    shared = fake.gradients + ranks * SharedFactors.bytes_needed(model, counts, dtype)
    shared += sum(
        _FLOAT_BYTES * SharedGradients.elements_needed(summed, rank) for rank in range(ranks)
    )
    if dtype.itemsize < _FLOAT_BYTES:
        shared += dtype.itemsize * fake.gradients // _FLOAT_BYTES
    capture_sufficient_factors(model, _copied)
    fake.release_gradients({*rows, *(shard.name for shard in summed[0])})
    step = list(fake.step(samples).events)
    private = []
    for own in shards:
        computed = [_FLOAT_BYTES * shard.elements for shard in own if shard.name in rows]
        state = [round(fake.state_ratio * _FLOAT_BYTES * shard.elements) for shard in own]
        # The initial weights are private until they are in shared memory.
        heap = heap_bytes(followed_by(step, computed), state, freed=fake.initial)
        private.append(heap + fake.read_bytes(samples))
    return NodeMemory(ranks=tuple(private), shared=shared)


def _copied(layer: str, inputs: Tensor, outputs_gradients: Tensor) -> None:
    """Take the factors of a pass, which are copied into shared memory."""
