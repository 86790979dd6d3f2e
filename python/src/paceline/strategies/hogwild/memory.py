"""Predict the memory of processes that update shared weights."""

from __future__ import annotations

from paceline.training.checkpointing import checkpoint_activations
from paceline.training.heap import heap_bytes
from paceline.training.step_memory import FakeModel, NodeMemory


def node_memory(fake: FakeModel) -> NodeMemory:
    """Return private memory of each process, with an optimiser of its own, and the weights."""
    trial = fake.trial
    checkpoint_activations(fake.task, fake.model, trial)
    samples = trial.placement.samples_of_a_replica(trial.training.global_batch)
    # The initial weights are private until they are in shared memory.
    heap = heap_bytes(list(fake.step(samples).events), fake.state, freed=fake.initial)
    rank = heap + fake.read_bytes(samples)
    return NodeMemory(ranks=(rank,) * trial.placement.ranks_per_node, shared=fake.gradients)
