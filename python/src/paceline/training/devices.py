"""GPUs: assignment to ranks, input transfers, and timing.

The CPU is a device too, for which these functions do nothing. A GPU works asynchronously: a call
returns before its work is done, so durations are measured by events in the GPU's queue.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import EnvironmentLacks
from paceline.plan.rank_context import RankContext
from paceline.plan.trial import Trial
from paceline.records.communication import StrategyResult

CPU = torch.device("cpu")


def device_of(trial: Trial, context: RankContext) -> torch.device:
    """Return the device of this rank: the CPU, or the GPU with the number of its local rank.

    Raises EnvironmentLacks if torch can use no GPU, or if a node has fewer GPUs than ranks without
    `oversubscribe`.
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
            f"host {context.host}: device cuda needs a GPU, torch finds none; check the driver "
            "(nvidia-smi) and CUDA_VISIBLE_DEVICES, or set device = 'cpu'"
        )
    if count < context.ranks_on_node and not trial.placement.oversubscribe:
        raise EnvironmentLacks(
            f"host {context.host}: {context.ranks_on_node} ranks need as many GPUs, rank "
            f"{context.rank} sees {count}; use fewer ranks, make all GPUs visible to every rank "
            "(CUDA_VISIBLE_DEVICES; Paceline chooses among them), or set oversubscribe = true"
        )
    return torch.device("cuda", context.local_rank % count)


def device_name(device: torch.device) -> str:
    """Return torch's name of the device with its model: "cuda:0 (NVIDIA H200)"."""
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def use_device(device: torch.device) -> StrategyResult:
    """Make `device` the current one, with the exact convolutions of the CPU. Return the settings,
    for the records.

    Otherwise convolutions of float32 may use TF32, with 10 instead of 23 bits of mantissa (PyTorch
    notes, CUDA semantics), and cuDNN may choose convolutions that sum in a different order
    each time, so runs could not be compared.
    """
    if device.type == "cpu":
        return {}
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return {"device": device_name(device), "tf32": tf32, "cudnn_deterministic": True}


def synchronize(device: torch.device) -> None:
    """Wait until all submitted work of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name in CPU memory; tensors already there are not copied."""
    return {name: tensor.detach().to(CPU) for name, tensor in tensors.items()}


class InputMover:
    """Copies batches to a device through pinned memory, in a stream of its own.

    A GPU can read pinned memory directly. torch reuses it for later batches, and a batch's memory
    is reused only after its copy is done. So the host may fill the next batch while the last one is
    still being copied, and computations wait only for their own batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move(self, host: Tensor) -> Tensor:
        """Return `host` on the device in the same memory format; on the CPU the tensor itself.

        It returns at once; work submitted later to the current stream waits for the copy.
        """
        if self._copies is None:
            return host
        pinned = host.pin_memory()
        with torch.cuda.stream(self._copies):
            moved = pinned.to(self._device, non_blocking=True)
            arrived = self._copies.record_event()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(arrived)
        # The memory belongs to the copy stream: keep it until `computing` is done.
        moved.record_stream(computing)
        return moved


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a device's work."""

    host_s: float  # time.perf_counter() when the program reached it
    event: torch.cuda.Event | None  # in the GPU's queue; None on the CPU


class Stopwatch:
    """Measures the times of a device's work; call `start` for each step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = self.mark()

    def start(self) -> float:
        """Wait for all earlier work, and return the time of perf_counter."""
        synchronize(self._device)
        self._started = self.mark()
        return self._started.host_s

    def mark(self) -> Mark:
        """Mark the end of the work submitted so far. Any of torch's threads may call it."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return Mark(time.perf_counter(), event)

    def reached_s(self, mark: Mark) -> float:
        """Return when the device reached `mark`, as time of perf_counter; waits until then."""
        if mark.event is None or self._started.event is None:
            return mark.host_s
        mark.event.synchronize()
        elapsed_ms = float(self._started.event.elapsed_time(mark.event))
        return self._started.host_s + elapsed_ms / 1000


def unix_s(moment_s: float) -> float:
    """Convert a time of perf_counter to seconds since the epoch."""
    return time.time() - (time.perf_counter() - moment_s)
