"""Transfers between stages: activations forward and gradients backward, through shared memory.

The sender writes into memory on which the receiver computes directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.collectives.node.signals import Channel
from paceline.train.training.devices import CPU, InputMover

if TYPE_CHECKING:
    from paceline.collectives.node.shared_node import SharedNode
    from paceline.train.strategies.pipeline.partition import Activation, GridPosition


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
