"""Transfers between stages: activations forward and gradients backward, through shared memory.

The sender writes into memory on which the receiver computes directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from paceline.collectives.node.semaphores import Barrier, Channel
from paceline.collectives.node.shared_node import SharedNode
from paceline.train.strategies.reduction.flat_layout import (
    FlatLayout,
    ParameterShard,
    copy_shards,
    gradients_of,
    shared_floats,
    touch,
    whole_lines,
)
from paceline.train.strategies.reduction.node_shards import OptimizerShard
from paceline.train.strategies.reduction.shared_sums import SharedGradients
from paceline.train.training.devices import CPU, InputMover, on_cpu
from paceline.train.training.state import persistent_buffers
from paceline.train.training.task import Task

if TYPE_CHECKING:
    from paceline.train.strategies.pipeline.partition import Activation, GridPosition, Layers


class StageLink:
    """Transfer of tensors of one kind through the slots of a channel; slot i holds micro-batch i.

    The sender calls `begin` once a step, then `send` for each micro-batch. The receiver calls
    `wait` and `received` for each, and `release` when it no longer needs the tensors. All calls are
    also made for a micro-batch without samples.
    """

    def __init__(self, slots: Channel, activation: Activation, device: torch.device = CPU) -> None:
        self._slots = slots
        self._activation = activation
        self._device = device
        self._mover = InputMover(device)

    def begin(self) -> None:
        """Wait until the receiver has released the previous step."""
        self._slots.begin()

    def send(self, index: int, tensor: Tensor | None) -> None:
        """Send a tensor of shape (samples, ...), or None for a micro-batch without samples."""
        if tensor is not None:
            self._view(index, len(tensor)).copy_(tensor)
        self._slots.post(index)

    def wait(self, index: int) -> None:
        """Wait for the message; raises TimedOut or PeerLost."""
        self._slots.wait(index)

    def received(self, index: int, samples: int) -> Tensor:
        """Return the message: on the CPU in the memory where it arrived, else a copy on the
        device."""
        return self._mover.move_pinned(self._view(index, samples))

    def placeholder(self) -> Tensor:
        """Return zeros like the message of one sample."""
        activation = self._activation
        zeros = torch.zeros(activation.bytes_per_sample, dtype=torch.uint8)
        return activation.view(zeros, 1).to(self._device)

    def release(self) -> None:
        self._slots.release()

    def _view(self, index: int, samples: int) -> Tensor:
        return self._activation.view(torch.from_numpy(self._slots.slot(index)), samples)


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """Both directions across one split point of one replica."""

    activations: StageLink
    gradients: StageLink


def open_split_points(
    shared: SharedNode,
    place: GridPosition,
    crossing: Sequence[Activation],
    samples: int,
    slots: int,
    device: torch.device,
) -> dict[int, SplitPoint]:
    """Open this worker's links, by the stage before each split point; collective over the node.

    crossing: activations by split point. samples: of a micro-batch, at most. slots: micro-batches.
    """
    opened = {}
    for replica in range(place.replicas):
        for stage, activation in enumerate(crossing):
            early, late = place.local_rank(replica, stage), place.local_rank(replica, stage + 1)
            size = samples * activation.bytes_per_sample
            channels = [
                shared.channel(*ends, slots, size) for ends in ((early, late), (late, early))
            ]
            if replica == place.replica and place.stage in (stage, stage + 1):
                for channel in channels:
                    _pin(channel, slots, device)
                opened[stage] = SplitPoint(
                    *(StageLink(channel, activation, device) for channel in channels)
                )
    return opened


def _pin(slots: Channel, count: int, device: torch.device) -> None:
    """Pin the slots so that a GPU can read and write them directly; does nothing on the CPU."""
    if device.type == "cuda":
        start, last = slots.slot(0).ctypes.data, slots.slot(count - 1)
        # All slots at once, because no page may be pinned twice. After a refusal copies are slower.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(start, last.ctypes.data + last.nbytes - start, 0)
        if code != runtime.cudaError.success:
            # CUDA keeps the error, and torch raises it after the next kernel, whatever that does.
            with suppress(RuntimeError):
                torch.ones(1, device=device)


# --- weights of pipeline stages in the memory of a node ------------------------------------------
#
# Replicas of a stage share its weights and sum its gradients. Several stages may use one parameter
# (tied weights, such as those of an embedding and an output). The first of them owns it: it sums
# its gradient and steps it. The other stages compute on the same shared memory, and hand their
# gradients to the owner. A stage reads new weights in its next forward pass, which needs the output
# of the owner's, so no further barrier is needed.


@dataclass(frozen=True, slots=True)
class StageReplicas:
    """The workers of a node with the same stage, seen from one of them."""

    own: int  # index of this worker's replica
    shards: Sequence[Sequence[ParameterShard]]  # shards of the stage's parameters by replica
    shared_gradients: Sequence[SharedGradients]  # by replica; [] if there is only one
    barrier: Barrier

    @classmethod
    def open(cls, shared: SharedNode, place: GridPosition, layouts: Sequence[FlatLayout]) -> Self:
        """Open what the replicas of this worker's stage share; collective over the node.

        layouts: of all stages.
        """
        own = None
        for stage, layout in enumerate(layouts):
            barrier = shared.barrier(place.siblings(stage))
            shards = layout.shards(place.replicas)
            gradients = []
            if place.replicas > 1:
                gradients = SharedGradients.of_workers(shared, layout, shards)
            if stage == place.stage:
                own = cls(place.replica, shards, gradients, barrier)
        assert own is not None, "the worker has one of the stages"
        return own

    def synchronise(self) -> None:
        """Wait for the other replicas of the stage."""
        if len(self.shards) > 1:
            self.barrier.wait()


class StageWeights:
    """One replica's view of a stage's weights; it owns some shards of them.

    On the CPU all replicas compute on shared memory. On a GPU a worker has a copy of its own: it
    copies stepped shards into the shared memory, and takes the shards of others from there.

    shard: the parameter shards that this worker owns, their gradients and optimiser. flat: the
    weights on which it computes, which updates change in place.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        shared: Tensor,
        replicas: StageReplicas,
        *,
        task: Task,
        device: torch.device | None,
    ) -> None:
        """layout: layout of the stage alone. parameters: the stage's parameters, equal on all
        replicas; their memory moves. shared: the stage's part of the node's weights, shape
        (layout.elements,). device: device of a separate copy; None for no copy."""
        self.elements = layout.elements
        self._layout = layout
        self._parameters = parameters
        self._shared = shared
        self.replicas = replicas
        self._has_copy = device is not None
        self.flat = torch.empty(layout.elements, device=device) if self._has_copy else shared
        own_shards = replicas.shards[replicas.own]
        touch(own_shards, shared)
        replicas.synchronise()
        layout.bind(parameters, self.flat, copy=self._has_copy or replicas.own == 0)
        self.shard = OptimizerShard(layout, own_shards, self.flat, task)

    def reduce(self) -> None:
        """Sum this worker's shards of the gradients over the replicas of the node."""
        own = gradients_of(self._parameters.items())
        others = list(self.replicas.shared_gradients)
        if others:
            mine = others.pop(self.replicas.own)
            for name, gradient in own.items():
                mine.write(name, gradient)
        self.replicas.synchronise()
        self.shard.reduce(own, [partial(self._gradient_of, replica) for replica in others])

    def exchange(self) -> None:
        """Give the other replicas of the stage the shards of this one, and take theirs."""
        if len(self.replicas.shards) == 1:
            return
        self.publish()
        self.replicas.synchronise()
        for replica, shards in enumerate(self.replicas.shards):
            if self._has_copy and replica != self.replicas.own:
                copy_shards(shards, self._shared, self.flat)

    def step_part(self, share: float) -> None:
        """Update with the gradient of a part of a batch; of a single replica without a copy.

        share: samples of the part / samples of the batch, over whose samples the loss is a mean.
        """
        self.reduce()
        for gradient in self.shard.gradient_tensors():
            gradient.div_(share)
        self.shard.step_part(share)

    def bind(self, flat: Tensor) -> None:
        """Let the parameters of the layers be views of an array like `flat`."""
        self._layout.bind(self._parameters, flat, copy=False)

    def publish(self) -> None:
        """Copy this worker's shards of the weights into the shared memory, if it has a copy of its
        own."""
        if self._has_copy:
            copy_shards(self.shard.parameter_shards, self.flat, self._shared)

    def _gradient_of(self, replica: SharedGradients, shard: ParameterShard) -> Tensor:
        return replica.read(shard).to(self.flat.device)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Names of the trained parameters by stage, each under its first name in the model."""

    owned: list[list[str]]
    borrowed: list[list[str]]  # owned by an earlier stage

    @classmethod
    def of(cls, model: nn.Module, stages: Sequence[Layers]) -> Ownership:
        names = {id(p): name for name, p in model.named_parameters()}
        taken: set[str] = set()
        owned: list[list[str]] = []
        borrowed: list[list[str]] = []
        for layers in stages:
            parameters = (p for _, layer in layers for p in layer.parameters() if p.requires_grad)
            used = dict.fromkeys(names[id(p)] for p in parameters)
            owned.append([name for name in used if name not in taken])
            borrowed.append([name for name in used if name in taken])
            taken.update(used)
        return cls(owned, borrowed)

    @property
    def has_ties(self) -> bool:
        """Return whether several stages use a parameter."""
        return any(self.borrowed)


class TiedGradients:
    """Gradients of borrowed parameters, in memory that the owner reads."""

    def __init__(
        self,
        shared: SharedNode,
        ownership: Ownership,
        parameters: Mapping[str, nn.Parameter],
        place: GridPosition,
    ) -> None:
        """parameters: of the whole model, still with their shapes. Collective over the node."""
        self._parameters, self._exist = parameters, ownership.has_ties
        self._lent: list[tuple[str, Tensor]] = []  # gradients that others compute for this stage
        self._borrowed: list[tuple[str, Tensor]] = []
        for replica in range(place.replicas):
            for user, names in enumerate(ownership.borrowed):
                for name in names:
                    parameter = parameters[name]
                    memory = shared_floats(shared, "tied gradients", parameter.numel())
                    gradient = memory.as_strided(parameter.shape, parameter.stride())
                    if replica != place.replica:
                        continue
                    if user == place.stage:
                        self._borrowed.append((name, gradient))
                    elif name in ownership.owned[place.stage]:
                        self._lent.append((name, gradient))

    def exchange(self, wait: Callable[[], None]) -> None:
        """Add the gradients of borrowed parameters to those of their owners.

        wait: barrier of all stages.
        """
        if not self._exist:
            return
        for name, gradient in self._borrowed:
            own = self._parameters[name].grad
            if own is None:
                gradient.zero_()
            else:
                gradient.copy_(own)
        wait()
        for name, gradient in self._lent:
            own = self._parameters[name].grad
            assert own is not None, "a stage sets the gradients of all of its parameters"
            own.add_(gradient)


class ModelState:
    """The state of the whole model on a node, by the names of the model.

    The stages publish their persistent buffers, for example running statistics. Every rank keeps
    all parameters that are not trained. own_buffers: those of this worker's stage.
    """

    def __init__(self, shared: SharedNode, model: nn.Module, stage: Layers) -> None:
        """stage: the layers of this worker. Collective over the node."""
        buffers = persistent_buffers(model)
        sizes = [whole_lines(buffer.nbytes) for buffer in buffers.values()]
        parts = torch.split(torch.from_numpy(shared.memory("buffers", sum(sizes))), sizes)
        self._buffers = {
            name: part[: buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for part, (name, buffer) in zip(parts, buffers.items(), strict=True)
        }
        names = {id(buffer): name for name, buffer in buffers.items()}
        self.own_buffers = {
            names[id(buffer)]: buffer
            for _, layer in stage
            for buffer in layer.buffers()
            if id(buffer) in names
        }
        named = {id(p): name for name, p in model.named_parameters()}
        # tied weights have several names
        state = model.state_dict(keep_vars=True)
        self._names = tuple(state)
        self._aliases = {name: named[id(t)] for name, t in state.items() if t.requires_grad}
        self._frozen = {
            name: t.detach() for name, t in state.items() if id(t) in named and not t.requires_grad
        }

    def publish_buffers(self) -> None:
        """Copy the buffers of this stage into the shared memory."""
        for name, buffer in self.own_buffers.items():
            self._buffers[name].copy_(buffer)

    def all(self, layout: FlatLayout, weights: Tensor) -> dict[str, Tensor]:
        """Return the published buffers of all stages, and the parameters.

        layout: of the trained parameters in `weights`.
        """
        others = {**self._buffers, **on_cpu(self._frozen)}
        return {
            name: others[name] if name in others else layout.view(weights, self._aliases[name])
            for name in self._names
        }
