"""Predict the memory of workers and servers."""

from __future__ import annotations

from paceline.strategies.parameter_server.descriptor import ParameterServerOptions
from paceline.training.checkpointing import checkpoint_activations
from paceline.training.heap import followed_by, heap_bytes
from paceline.training.step_memory import FakeModel, NodeMemory


def node_memory(fake: FakeModel) -> NodeMemory:
    """Return the memory of each rank: a replica, accrued gradients, and the server of a shard."""
    trial = fake.trial
    options, ranks = trial.options_as(ParameterServerOptions), trial.placement.ranks
    checkpoint_activations(fake.task, fake.model, trial)
    samples = trial.placement.samples_of_a_replica(trial.training.global_batch)
    step = list(fake.step(samples).events)
    shard, others = -(-fake.gradients // ranks), ranks - 1
    state = [round(fake.state_ratio * shard)]
    if options.has_local_optimizer:
        state += fake.state
    # Answers to the other workers are copies; a synchronous server stacks and sums all gradients.
    exchanged = others * [shard]
    if options.update_mode == "synchronous":
        exchanged += [ranks * shard, shard]
    elif options.update_mode == "shat":
        exchanged.append(fake.gradients)
    server = (2 + others) * shard  # weights, gradient, and those that arrive
    rank = fake.weights + fake.gradients + server + fake.read_bytes(samples)
    rank += heap_bytes(followed_by(step, exchanged), state, freed=fake.initial)
    return NodeMemory(ranks=(rank,) * trial.placement.ranks_per_node)
