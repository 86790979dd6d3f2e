"""A model split into stages, one process each, and replicas of that (`pipeline`, `hybrid`).

Local rank L is stage L % s of replica L // s. The node has one copy of the weights in shared
memory; each worker uses those of its stage and frees the rest. Neighbouring stages exchange
activations and gradients through shared memory. A step is

    each worker: the passes of its stage in the order of the schedule (see stage.py)
    barrier of the replicas of a stage
    each worker: sums its shards of the stage's gradients over the replicas, then over the nodes,
                 except for linear layers whose factors were gathered (see factor_exchange.py)
    each worker: optimiser step of its shards
    barrier of the replicas of a stage

Stages wait for each other only where data crosses a split point: an early stage begins the next
step while a late one still updates its weights.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.base.errors import UsageError
from paceline.collectives.node.shared_node import SharedNode
from paceline.collectives.recorder import SHARED_REDUCE, begin_operation
from paceline.measure.records.communication import StrategyResult
from paceline.plan.trials.rules import micro_batch_fault
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies.pipeline.deferred import is_deferred
from paceline.train.strategies.pipeline.links import (
    ModelState,
    Ownership,
    SplitPoint,
    StageReplicas,
    StageWeights,
    TiedGradients,
    open_split_points,
)
from paceline.train.strategies.pipeline.partition import (
    GridPosition,
    Layers,
    micro_batch_samples,
    partition_model,
    settings_of,
    stage_bounds,
)
from paceline.train.strategies.pipeline.stage import Stage, actions
from paceline.train.strategies.reduction.factor_exchange import NodeFactors
from paceline.train.strategies.reduction.flat_layout import FlatLayout, shared_floats
from paceline.train.strategies.reduction.node_shards import ShardedStrategy
from paceline.train.strategies.reduction.replicate_group import ReplicateGroup
from paceline.train.strategies.reduction.shared_sums import SharedSum, shared_rows
from paceline.train.strategies.reduction.sufficient_factors import linear_layers
from paceline.train.training.batch_norm import batch_norms, normalise_alone, statistics_width
from paceline.train.training.checkpointing import stored_bytes
from paceline.train.training.devices import CPU, device_of, use_device
from paceline.train.training.optimizers import trained_parameters
from paceline.train.training.state import SavedState
from paceline.train.training.strategy import GradientResult, RankGroups, TrainBatch
from paceline.train.training.task import Task


class PipelineStrategy(ShardedStrategy):
    """One stage of one replica."""

    _stage: Stage

    def prepare(
        self, task: Task, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Split the model, keep this rank's stage, and share memory with the ranks of the node.

        Raises UsageError if the model cannot be split as `trial` requests, EnvironmentLacks if the
        ranks cannot share memory.
        """
        self._task = task
        fault = micro_batch_fault(list(batch_norms(model)), "the model", trial)
        if fault is not None:
            raise UsageError(fault)
        layers, place = task.blocks(model), GridPosition.of(context, trial.placement.stages)
        if trial.training.batch_norm == "per-replica":
            normalise_alone(model)
        self._siblings = f"node {context.node_index} stage {place.stage}"
        self._replicas = place.replicas
        self._saves_shards, self._saves_buffers = context.node_index == 0, place.replica == 0
        device = device_of(trial, context)
        chosen = use_device(device, trial.training)
        # Before a measurement for the partition moves the layers to the device.
        stored = stored_bytes(task, layers) if trial.training.activation_checkpointing else None
        division = partition_model(task, layers, trial, peers.world("split_points"), device)
        self._description: StrategyResult = {**division.describe(layers, trial), **chosen}
        self._alone = trial.placement.replicas == 1
        self._replicate_group = ReplicateGroup.join(trial, context, peers)
        shared = self._shared = SharedNode(peers.node("pipeline"), trial.limits.collective_s)
        self._everyone = shared.barrier(range(context.ranks_on_node))
        samples, slots = micro_batch_samples(trial), settings_of(trial).micro_batches
        links = open_split_points(shared, place, division.crossing, samples, slots, device)
        bounds = stage_bounds(division.split_points, len(layers))
        low, high = bounds[place.stage]
        own = layers[low:high]
        before, after = links.get(place.stage - 1), links.get(place.stage)
        self._open_stage(own, place, before, after, trial, device)
        if stored is not None:
            self._stage.checkpoint_activations(stored[low:high])
        self._gather_factors(model, trial, place, layers, own)
        self._state = ModelState(shared, model, own)
        ownership = Ownership.of(model, [layers[low:high] for low, high in bounds])
        self._has_ties = ownership.has_ties
        if ownership.has_ties and device != CPU:
            raise UsageError(
                f"parameter {next(filter(None, ownership.borrowed))[0]} belongs to several stages, "
                "which share it in the memory of CPUs; expected device cpu, or other split_points"
            )
        self._share_weights(trained_parameters(model), place, ownership, device)
        workers, width = range(context.ranks_on_node), max(1, statistics_width(model))
        rows = shared_rows(shared, "sums", len(workers), width)
        self._total_of_owners = SharedSum(rows, workers, context.local_rank, self._everyone.wait)
        if not self._alone:
            siblings, wait = place.siblings(place.stage), self._weights.replicas.synchronise
            own_rank, sum_over_nodes = context.local_rank, self._replicate_group.sum_vector
            self._stage.synchronise(SharedSum(rows, siblings, own_rank, wait, sum_over_nodes))
        self._everyone.wait()  # all weights have been copied

    def _open_stage(
        self,
        layers: Layers,
        place: GridPosition,
        before: SplitPoint | None,
        after: SplitPoint | None,
        trial: Trial,
        device: torch.device,
    ) -> None:
        """Create the stage that runs these layers."""
        settings = settings_of(trial)
        order = actions(settings.schedule, place.stage, place.stages, settings.micro_batches)
        self._stage = Stage(self._task, layers, order, before, after, trial.training, device)

    def _gather_factors(
        self, model: nn.Module, trial: Trial, place: GridPosition, layers: Layers, own: Layers
    ) -> None:
        """Choose the linear layers whose factors cross the network; collective over all ranks."""
        nodes = self._node_factors = NodeFactors(trial)
        if not nodes.may_send:
            return
        deferred = {name for name, layer in layers if is_deferred(layer)}
        found = linear_layers(model, self._task.example_input()).items()
        candidates = {name: layer for name, layer in found if name in deferred}
        own_names = {name for name, _ in own}
        nodes.join(candidates, self._replicate_group, owners=place.replicas, own=own_names)
        self._stage.gather_factors(nodes)

    def _share_weights(
        self,
        parameters: dict[str, nn.Parameter],
        place: GridPosition,
        ownership: Ownership,
        device: torch.device,
    ) -> None:
        """Move the stage's weights into shared memory, and free those of other stages."""
        shared, names = self._shared, ownership.owned
        assert shared is not None, "prepare has opened it"
        self._tied = TiedGradients(shared, ownership, dict(parameters), place)
        # In the order of the stages, so that each has consecutive memory.
        self._layout = FlatLayout.of((n, parameters[n]) for stage in names for n in stage)
        self._shared_weights = shared_floats(shared, "the weights", self._layout.elements)
        layouts = [FlatLayout.of((name, parameters[name]) for name in stage) for stage in names]
        replicas = StageReplicas.open(shared, place, layouts)
        whole = self._layout.only(names[place.stage])
        self._own_elements = slice(whole.begin, whole.end)
        own = {name: parameters.pop(name) for name in names[place.stage]}
        borrowed = {name: parameters.pop(name) for name in ownership.borrowed[place.stage]}
        for parameter in parameters.values():
            parameter.data = torch.empty(0)
        self._layout.only(borrowed).bind(borrowed, self._shared_weights, copy=False)
        self._weights = StageWeights(
            layouts[place.stage],
            own,
            self._shared_weights[self._own_elements],
            replicas,
            task=self._task,
            device=None if device == CPU else device,
        )
        self._shards = [self._weights.shard]

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Run the stage's passes and sum its gradients.

        comm_s is the reduction over replicas and nodes; None if there is only one replica.
        """
        self._node_factors.begin(batch.global_samples)
        passed = self._stage.run(batch)
        ready_s, ready_unix_s = time.perf_counter(), time.time()
        operation = begin_operation(
            self._siblings, self._replicas, SHARED_REDUCE, 4 * self._weights.elements
        )
        self._tied.exchange(self._everyone.wait)
        self._weights.reduce()
        if self._replicas > 1:
            operation.end()
        self._sum_over_nodes()
        if self._alone:
            return passed
        return replace(passed, comm_s=time.perf_counter() - ready_s, comm_ready_unix_s=ready_unix_s)

    def step(self) -> None:
        self._weights.shard.step(self._squared_norm())
        self._weights.exchange()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights in shared memory, and the buffers of all stages."""
        self._weights.publish()
        if self._saves_buffers:
            self._state.publish_buffers()
        self._everyone.wait()
        return self._state.all(self._layout, self._shared_weights)

    def restore(self, saved: SavedState) -> None:
        super().restore(saved)
        self._weights.exchange()
        self._everyone.wait()

    def _wait_for_node(self) -> None:
        self._everyone.wait()

    def buffers_of_replicas(self) -> list[dict[str, Tensor]]:
        return [self._state.own_buffers]

    def describe(self) -> StrategyResult:
        return {**self._description, **super().describe()}
