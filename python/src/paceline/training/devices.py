"""GPUs: which one is a rank's, how photos get there, and when its work was done.

The CPU is a device too, for which all of this is nothing to do. A GPU works beside the program: a
call returns before its work is done, so durations are taken by events in the GPU's own queue.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import EnvironmentLacks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.plan.trial import Trial
    from paceline.training.context import RankContext

CPU = torch.device("cpu")


def device_of(trial: Trial, context: RankContext) -> torch.device:
    """Where this rank computes: the CPU, or the GPU with the number of its local rank.

    Raises EnvironmentLacks if there is no GPU that torch can use, or if a node has fewer than ranks
    without `oversubscribe`.
    """
    if trial.device == "cpu":
        return CPU
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise EnvironmentLacks(
            f"host {context.host}: device cuda needs a torch with CUDA, torch {torch.__version__} "
            "is built without; install the same version's CUDA build (pytorch.org, Get Started), "
            "or set device = 'cpu'"
        )
    return _gpu(torch.cuda.device_count(), trial, context)


def _gpu(count: int, trial: Trial, context: RankContext) -> torch.device:
    if count == 0:
        raise EnvironmentLacks(
            f"host {context.host}: device cuda needs a GPU, torch finds none: is the driver loaded "
            "(nvidia-smi), and does CUDA_VISIBLE_DEVICES leave any? Else set device = 'cpu'"
        )
    if count < context.ranks_on_node and not trial.placement.oversubscribe:
        raise EnvironmentLacks(
            f"host {context.host}: {context.ranks_on_node} ranks need as many GPUs, rank "
            f"{context.rank} sees {count}; ask for fewer ranks, show every rank all GPUs "
            "(CUDA_VISIBLE_DEVICES; Paceline chooses among them), or set oversubscribe = true"
        )
    return torch.device("cuda", context.local_rank % count)


def device_name(device: torch.device) -> str:
    """As torch names it, with its model: "cuda:0 (NVIDIA H200)"."""
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def use_device(device: torch.device) -> dict[str, Any]:
    """Make `device` this process's own, computing as exactly as the CPU does.

    Without this, matrix products of float32 may be taken in TF32, with 10 bits of mantissa instead
    of 23 (PyTorch notes, CUDA semantics), and cuDNN may choose convolutions whose sums come out in
    another order each time: runs could not be compared. Returns what was set, for the records.
    """
    if device.type == "cpu":
        return {}
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    return {"device": device_name(device), "tf32": False, "cudnn_deterministic": True}


def synchronize(device: torch.device) -> None:
    """Wait until all work given to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same by name, in the CPU's memory; what is there already is not copied."""
    return {name: tensor.detach().to(CPU) for name, tensor in tensors.items()}


class InputMover:
    """Brings batches to a device: through pinned memory, in a queue of their own.

    Pinned memory is what a GPU can read by itself; torch keeps it for later batches, and a batch's
    only becomes free when its copy is done. So the host may fill the next one while the last is
    still on its way, and what computes waits only for its own batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move(self, host: Tensor) -> Tensor:
        """`host` on the device, in the same memory format; itself if that is the CPU.

        Returns at once; work given to the device later, in its current queue, finds the copy done.
        """
        if self._copies is None:
            return host
        pinned = host.pin_memory()
        with torch.cuda.stream(self._copies):
            moved = pinned.to(self._device, non_blocking=True)
            arrived = self._copies.record_event()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(arrived)
        # The memory was taken for the copies' queue: it is not free before `computing` is done.
        moved.record_stream(computing)
        return moved


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in a device's work."""

    host_s: float  # perf_counter: when the program was there
    event: torch.cuda.Event | None  # in the GPU's queue


class Stopwatch:
    """Takes the times of what a device does; `start` anew for each step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = self.mark()

    def start(self) -> float:
        """Wait for all earlier work; returns the moment, as perf_counter counts."""
        synchronize(self._device)
        self._started = self.mark()
        return self._started.host_s

    def mark(self) -> Mark:
        """Note that the work given so far ends here. May be called by torch's other threads."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return Mark(time.perf_counter(), event)

    def reached_s(self, mark: Mark) -> float:
        """When the device reached `mark`, as perf_counter counts; waits until it has."""
        if mark.event is None or self._started.event is None:
            return mark.host_s
        mark.event.synchronize()
        elapsed_ms = float(self._started.event.elapsed_time(mark.event))
        return self._started.host_s + elapsed_ms / 1000


def unix_s(moment_s: float) -> float:
    """A moment that perf_counter counts, in seconds since the epoch."""
    return time.time() - (time.perf_counter() - moment_s)
