"""A model split into stages, one process each, and replicas of that (`pipeline`, `hybrid`).

Local rank L is stage L % s of replica L // s. The node has one copy of the weights in shared
memory; each worker uses those of its stage and frees the rest. Neighbouring stages exchange
activations and gradients through shared memory. A step is

    each worker: the passes of its stage in the order of the schedule (see stage.py)
    barrier of the replicas of a stage
    each worker: sums its shards of the stage's gradients over the replicas, then over the nodes,
                 except for linear layers whose factors were gathered (see node_factors.py)
    each worker: optimiser step of its shards
    barrier of the replicas of a stage

Stages wait for each other only where data crosses a split point: an early stage begins the next
step while a late one still updates its weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.node.barrier import Barrier
from paceline.node.shared_node import SharedNode
from paceline.plan.task_rules import micro_batch_fault
from paceline.strategies.pipeline.buffers import SharedBuffers
from paceline.strategies.pipeline.deferred import is_deferred
from paceline.strategies.pipeline.links import Link, SplitPoint, pin
from paceline.strategies.pipeline.partition import (
    BatchSizes,
    Partition,
    partition_model,
    settings_of,
)
from paceline.strategies.pipeline.schedules import actions
from paceline.strategies.pipeline.split_points import stage_bounds
from paceline.strategies.pipeline.stage import Stage
from paceline.strategies.pipeline.stage_weights import StageReplicas, StageWeights
from paceline.strategies.pipeline.tied import Ownership, TiedGradients
from paceline.strategies.reduction.flat_layout import FlatLayout, shared_floats
from paceline.strategies.reduction.node_factors import NodeFactors
from paceline.strategies.reduction.replicate_group import ReplicateGroup
from paceline.strategies.reduction.sharded_strategy import ShardedStrategy
from paceline.strategies.reduction.shared_gradients import SharedGradients
from paceline.strategies.reduction.shared_sum import SharedSum, shared_rows
from paceline.strategies.reduction.sufficient_factors import mark_all_but, mark_summed_layers
from paceline.training.batch_norm import batch_norms, normalise_alone, statistics_width
from paceline.training.checkpointing import stored_bytes
from paceline.training.devices import CPU, device_of, on_cpu, use_device
from paceline.training.optimizers import trained_parameters
from paceline.training.strategy import GradientResult, TrainBatch
from paceline.transports.recorder import SHARED_REDUCE, begin_operation

if TYPE_CHECKING:
    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial
    from paceline.records.communication import StrategyResult
    from paceline.strategies.pipeline.split_points import Layers
    from paceline.training.state import SavedState
    from paceline.training.strategy import RankGroups
    from paceline.training.task import Task


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a worker on its node."""

    replica: int
    stage: int
    replicas: int
    stages: int

    @classmethod
    def of(cls, context: RankContext, stages: int) -> Place:
        replica, stage = divmod(context.local_rank, stages)
        return cls(replica, stage, context.ranks_on_node // stages, stages)

    def local_rank(self, replica: int, stage: int) -> int:
        return replica * self.stages + stage

    def siblings(self, stage: int) -> list[int]:
        """Return the local ranks of this stage in all replicas."""
        return [self.local_rank(replica, stage) for replica in range(self.replicas)]


class PipelineStrategy(ShardedStrategy):
    """One stage of one replica."""

    def __init__(self) -> None:
        super().__init__()
        self._description: StrategyResult = {}
        self._shared_weights: Tensor
        self._stage: Stage
        self._weights: StageWeights
        self._buffers: SharedBuffers
        self._tied: TiedGradients
        self._has_ties = False
        self._aliases: dict[str, str]  # name in the state -> name of the trained parameter
        self._frozen: dict[str, Tensor]  # every rank keeps all parameters that are not trained
        self._state_names: tuple[str, ...] = ()
        self._siblings = ""  # name of the node's workers with this stage in the records
        self._replicas = 1  # on this node
        self._everyone: Barrier  # of all workers of the node
        self._alone = True  # whether there is only one replica on all nodes

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
        layers, place = task.blocks(model), Place.of(context, trial.placement.stages)
        if trial.training.batch_norm == "per-replica":
            normalise_alone(model)
        self._siblings = f"node {context.node_index} stage {place.stage}"
        self._replicas = place.replicas
        self._saves_shards, self._saves_buffers = context.node_index == 0, place.replica == 0
        device = device_of(trial, context)
        chosen = use_device(device)
        # Before a measurement for the partition moves the layers to the device.
        stored = stored_bytes(task, layers) if trial.training.activation_checkpointing else None
        division = partition_model(task, layers, trial, peers.world("split_points"), device)
        self._description = {**division.describe(layers, trial), **chosen}
        self._alone = trial.placement.replicas == 1
        self._replicate_group = ReplicateGroup.join(trial, context, peers)
        node = peers.node("pipeline")
        assert node is not None, "stages are ranks, and there are at least two"
        shared = self._shared = SharedNode(node, trial.limits.collective_s)
        self._everyone = shared.barrier(range(context.ranks_on_node))
        split_points = _open_split_points(shared, place, division, trial, device)
        bounds = stage_bounds(division.split_points, len(layers))
        low, high = bounds[place.stage]
        self._open_stage(
            layers[low:high],
            place,
            split_points.get(place.stage - 1),
            split_points.get(place.stage),
            trial,
            device,
        )
        if stored is not None:
            self._stage.checkpoint_activations(stored[low:high])
        self._gather_factors(model, trial, place, layers, (low, high))
        self._buffers = SharedBuffers(shared, model, layers[low:high])
        named = {id(p): name for name, p in model.named_parameters()}
        # tied weights have several names
        state = model.state_dict(keep_vars=True)
        self._aliases = {name: named[id(t)] for name, t in state.items() if t.requires_grad}
        self._frozen = {
            name: t.detach() for name, t in state.items() if id(t) in named and not t.requires_grad
        }
        self._state_names = tuple(state)
        ownership = Ownership.of(model, [layers[low:high] for low, high in bounds])
        if ownership.has_ties and device != CPU:
            raise UsageError(
                f"parameter {next(filter(None, ownership.borrowed))[0]} belongs to several stages, "
                "which share it in the memory of CPUs; expected device cpu, or other split_points"
            )
        self._share_weights(trained_parameters(model), place, ownership, layers, device)

    def _open_stage(
        self,
        layers: Layers,
        place: Place,
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
        self,
        model: nn.Module,
        trial: Trial,
        place: Place,
        layers: Layers,
        bounds: tuple[int, int],
    ) -> None:
        """Choose the linear layers whose factors cross the network; collective over all ranks."""
        nodes = self._node_factors = NodeFactors(trial)
        if not nodes.may_send:
            return
        mark_summed_layers(model, self._task.example_input())
        mark_all_but(model, {name for name, layer in layers if is_deferred(layer)})
        own = {name for name, _ in layers[slice(*bounds)]}
        nodes.join(model, self._replicate_group, owners=place.replicas, own=own)
        self._stage.gather_factors(nodes)

    def _share_weights(
        self,
        parameters: dict[str, nn.Parameter],
        place: Place,
        ownership: Ownership,
        layers: Layers,
        device: torch.device,
    ) -> None:
        """Move the stage's weights into shared memory, and free those of other stages."""
        shared, names = self._running(), ownership.owned
        self._tied = TiedGradients(
            shared,
            ownership,
            dict(parameters),
            replica=place.replica,
            replicas=place.replicas,
            stage=place.stage,
        )
        self._has_ties = ownership.has_ties
        # In the order of the stages, so that each has consecutive memory.
        self._layout = FlatLayout.of((n, parameters[n]) for stage in names for n in stage)
        self._shared_weights = shared_floats(shared, "the weights", self._layout.elements)
        layouts = [FlatLayout.of((name, parameters[name]) for name in stage) for stage in names]
        replicas = _open_replicas(shared, place, layouts)
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
            self._shared_weights[whole.begin : whole.end],
            replicas,
            task=self._task,
            device=None if device == CPU else device,
        )
        self._shards = [self._weights.shard]
        workers = place.replicas * place.stages
        width = max(1, *(statistics_width(layer) for _, layer in layers))
        rows = shared_rows(shared, "sums", workers, width)
        own_rank = place.local_rank(place.replica, place.stage)
        self._total_of_node = SharedSum(rows, range(workers), own_rank, self._everyone.wait)
        if not self._alone:
            total = SharedSum(
                rows,
                place.siblings(place.stage),
                own_rank,
                replicas.synchronise,
                self._replicate_group,
            )
            self._stage.synchronise(total)
        self._everyone.wait()  # all weights have been copied

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
        if self._has_ties:
            self._tied.publish()
            self._everyone.wait()
            self._tied.collect()
        self._weights.reduce()
        if self._replicas > 1:
            operation.end()
        self._sum_over_nodes()
        if self._alone:
            return passed
        return replace(passed, comm_s=time.perf_counter() - ready_s, comm_ready_unix_s=ready_unix_s)

    def step(self) -> None:
        self._weights.step(self._squared_norm())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights in shared memory, and the buffers of all stages."""
        self._weights.publish()
        if self._saves_buffers:
            self._buffers.publish()
        self._everyone.wait()
        others = {**self._buffers.all(), **on_cpu(self._frozen)}
        return {
            name: others[name]
            if name in others
            else self._layout.view(self._shared_weights, self._aliases[name])
            for name in self._state_names
        }

    def restore(self, saved: SavedState) -> None:
        super().restore(saved)
        self._weights.exchange()
        self._everyone.wait()

    def _wait_for_node(self) -> None:
        self._everyone.wait()

    def buffers_of_replicas(self) -> list[dict[str, Tensor]]:
        return [self._buffers.own]

    def describe(self) -> StrategyResult:
        return {**self._description, **super().describe()}


def _open_split_points(
    shared: SharedNode, place: Place, division: Partition, trial: Trial, device: torch.device
) -> dict[int, SplitPoint]:
    """Open this worker's links, by the stage before each split point; collective over the node."""
    samples, slots = BatchSizes.of(trial).micro_batch, settings_of(trial).micro_batches
    opened = {}
    for replica in range(place.replicas):
        for stage, activation in enumerate(division.crossing):
            early, late = place.local_rank(replica, stage), place.local_rank(replica, stage + 1)
            size = samples * activation.bytes_per_sample
            channels = [
                shared.channel(*ends, slots, size) for ends in ((early, late), (late, early))
            ]
            if place.local_rank(place.replica, place.stage) in (early, late):
                for channel in channels:
                    pin(channel, slots, device)
                opened[stage] = SplitPoint(
                    *(Link(channel, activation, device) for channel in channels)
                )
    return opened


def _open_replicas(shared: SharedNode, place: Place, layouts: list[FlatLayout]) -> StageReplicas:
    """Open what the replicas of this worker's stage share; collective over the node, for all
    stages."""
    barriers = [shared.barrier(place.siblings(stage)) for stage in range(place.stages)]
    shards = [layout.shards(place.replicas) for layout in layouts]
    shared_gradients = []
    for replica in range(place.replicas if place.replicas > 1 else 0):
        for stage, layout in enumerate(layouts):
            elements = SharedGradients.elements_needed(shards[stage], replica)
            memory = shared_floats(shared, "the replicas' gradients", elements)
            if stage == place.stage:
                shared_gradients.append(SharedGradients(layout, shards[stage], replica, memory))
    return StageReplicas(
        place.replica, shards[place.stage], shared_gradients, barriers[place.stage]
    )
