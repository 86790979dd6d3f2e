"""Partition of a trial's model into stages, equal on all ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from paceline.errors import UsageError
from paceline.strategies.pipeline.descriptor import PipelineOptions, model_faults
from paceline.strategies.pipeline.profile import profile_layers
from paceline.strategies.pipeline.split_points import (
    Activation,
    balanced_split_points,
    layer_bytes,
    trace,
)
from paceline.training.devices import CPU
from paceline.workloads.facts import legal_split_points

if TYPE_CHECKING:
    import torch

    from paceline.node.memory import NodeShare
    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial
    from paceline.records.communication import StrategyResult
    from paceline.strategies.pipeline.split_points import Layers
    from paceline.training.task import Task


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a worker on its node."""

    replica: int
    stage: int
    replicas: int
    stages: int

    @classmethod
    def of(cls, context: RankContext, stages: int) -> Self:
        replica, stage = divmod(context.local_rank, stages)
        return cls(replica, stage, context.ranks_on_node // stages, stages)

    def local_rank(self, replica: int, stage: int) -> int:
        return replica * self.stages + stage

    def siblings(self, stage: int) -> list[int]:
        """Return the local ranks of this stage in all replicas."""
        return [self.local_rank(replica, stage) for replica in range(self.replicas)]


@dataclass(frozen=True, slots=True)
class Partition:
    """Split points of a model, and the activations that cross them."""

    split_points: list[int]
    crossing: list[Activation]  # by split point

    def describe(self, layers: Layers, trial: Trial) -> StrategyResult:
        """Return the partition for the records; bytes are per step and replica."""
        samples = trial.placement.samples_of_a_replica(trial.training.global_batch)
        crossing_bytes = [samples * activation.bytes_per_sample for activation in self.crossing]
        return {
            "split_points": self.split_points,
            "first_layers": [layers[index][0] for index in self.split_points],
            "bytes_forward": crossing_bytes,
            "bytes_backward": crossing_bytes,
        }


def settings_of(trial: Trial) -> PipelineOptions:
    return trial.options_as(PipelineOptions)


def micro_batch_samples(trial: Trial) -> int:
    """Return the maximum number of samples of a micro-batch."""
    replica = trial.placement.samples_of_a_replica(trial.training.global_batch)
    return -(-replica // settings_of(trial).micro_batches)


def partition_model(
    task: Task,
    layers: Layers,
    trial: Trial,
    world: NodeShare | None,
    device: torch.device = CPU,
) -> Partition:
    """Split `layers` as `trial` requests. With balance "time" it is collective: rank 0 measures
    while the others wait, at most `limits.trial_s`.

    Raises UsageError if the model cannot be split so, TimedOut if rank 0 does not answer.
    """
    settings, stages = settings_of(trial), trial.placement.stages
    activations = trace(task, layers, trial.training)
    places = legal_split_points(layers)
    faults = list(model_faults(trial.training.model, places, stages, settings.split_points))
    if faults:
        raise UsageError("; ".join(faults))
    if settings.split_points is not None:
        split_points = list(settings.split_points)
    elif settings.balance == "size":
        costs = layer_bytes(layers, activations, micro_batch_samples(trial))
        split_points = balanced_split_points(costs, stages, places)
    else:
        split_points = _by_time(task, layers, trial, world, device)
    return Partition(split_points, [activations[index - 1] for index in split_points])


def _by_time(
    task: Task, layers: Layers, trial: Trial, world: NodeShare | None, device: torch.device
) -> list[int]:
    if world is not None and world.local_rank != 0:
        found: list[int] = json.loads(world.lookup("split_points", trial.limits.trial_s))
        return found
    settings = settings_of(trial)
    profile = profile_layers(
        task,
        layers,
        trial.training,
        samples=micro_batch_samples(trial),
        micro_batches=settings.micro_batches,
        replicas=trial.placement.replicas_per_node,
        device=device,
    )
    split_points = balanced_split_points(
        profile.layer_costs_s(len(layers)),
        trial.placement.stages,
        legal_split_points(layers),
        profile.crossing_costs_s(len(layers)),
    )
    if world is not None:
        world.publish("split_points", json.dumps(split_points))
    return split_points
