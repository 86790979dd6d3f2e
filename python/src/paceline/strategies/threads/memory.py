"""Predict the memory of replicas in the threads of one process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.strategies.reduction.sufficient_factors import (
    capture_sufficient_factors,
    mark_summed_layers,
    rows_of,
)
from paceline.training.checkpointing import checkpoint_activations
from paceline.training.heap import followed_by, heap_bytes, interleaved
from paceline.training.optimizers import trained_parameters
from paceline.training.precision import working_dtype
from paceline.training.step_memory import FakeModel, NodeMemory

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT_BYTES = 4


def node_memory(fake: FakeModel) -> NodeMemory:
    """Return the memory of each rank: one copy of weights and state, and the steps of all
    replicas at the same time."""
    trial, model = fake.trial, fake.model
    samples = trial.placement.samples_of_a_replica(trial.training.global_batch)
    replicas = trial.placement.replicas_per_rank
    checkpoint_activations(fake.task, model, trial)
    mark_summed_layers(model, fake.task.example_input())
    rows, parameters = rows_of(model), trained_parameters(model)
    of_rows = [parameters[name].nbytes for name in rows]
    factors: list[Tensor] = []
    capture_sufficient_factors(model, partial(_keep, factors))
    step = interleaved(fake.step(samples).events, replicas)
    itemsize = working_dtype(trial.training).itemsize
    copy = 0 if itemsize == _FLOAT_BYTES else itemsize * fake.gradients // _FLOAT_BYTES
    rank = fake.weights + copy + replicas * fake.read_bytes(samples)
    rank += heap_bytes(followed_by(step, of_rows), fake.state)
    return NodeMemory(ranks=(rank,) * trial.placement.ranks_per_node)


def _keep(factors: list[Tensor], layer: str, inputs: Tensor, outputs_gradients: Tensor) -> None:  # noqa: ARG001
    factors.extend((inputs, outputs_gradients))
