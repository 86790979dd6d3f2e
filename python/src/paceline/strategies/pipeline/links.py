"""What crosses a cut: activations one way, their gradients the other, through shared memory.

A message is written by its sender straight into memory that its receiver computes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.training.devices import CPU

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from paceline.strategies.pipeline.shapes import Activation


class Slots(Protocol):
    """One direction between two ranks (paceline.transports.shared.Channel)."""

    def slot(self, index: int) -> NDArray[np.uint8]: ...

    def begin(self) -> None: ...

    def post(self, index: int) -> None: ...

    def wait(self, index: int) -> None: ...

    def release(self) -> None: ...


class Link:
    """Tensors of one kind through the slots of a channel, slot i for micro-batch i.

    The sender calls `begin` once a step, then `send` for each micro-batch; the receiver `wait` and
    `received` for each, and `release` when it needs none of the tensors any more. All of them take
    part for a micro-batch without samples, too.
    """

    def __init__(self, slots: Slots, activation: Activation, device: torch.device = CPU) -> None:
        self._slots = slots
        self._activation = activation
        self._device = device
        self._copies = _own_queue(device)

    def begin(self) -> None:
        """Wait until the receiver has released the step before."""
        self._slots.begin()

    def send(self, index: int, tensor: Tensor | None) -> None:
        """tensor: shape (samples, ...); None for a micro-batch without samples."""
        if tensor is not None:
            self._view(index, len(tensor)).copy_(tensor)
        self._slots.post(index)

    def wait(self, index: int) -> None:
        """Wait until the message is there; raises TimedOut or PeerLost."""
        self._slots.wait(index)

    def received(self, index: int, samples: int) -> Tensor:
        """The message: on the CPU in the memory it came in, else a copy on the device.

        The copy has a queue of its own: what the device still computes does not hold it up.
        """
        arrived = self._view(index, samples)
        if self._copies is None:
            return arrived
        with torch.cuda.stream(self._copies):
            moved = arrived.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)
        moved.record_stream(computing)
        return moved

    def release(self) -> None:
        self._slots.release()

    def _view(self, index: int, samples: int) -> Tensor:
        return self._activation.view(torch.from_numpy(self._slots.slot(index)), samples)


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """Both directions across one cut of one replica."""

    activations: Link
    gradients: Link


def pin(slots: Slots, count: int, device: torch.device) -> None:
    """Let a GPU read and write the slots by itself; without that, copies are slower. Nothing to do
    for the CPU."""
    if device.type == "cuda":
        start, last = slots.slot(0).ctypes.data, slots.slot(count - 1)
        # All at once, as no page may be pinned twice. Refused, it returns a code: slow is no error.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(start, last.ctypes.data + last.nbytes - start, 0)


def _own_queue(device: torch.device) -> torch.cuda.Stream | None:
    if device.type == "cpu":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
