"""GPUs: assignment to ranks, input transfers, and timing.

The CPU is a device too, for which these functions do nothing. A GPU works asynchronously: a call
returns before its work is done, so durations are measured by events in the GPU's queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.errors import EnvironmentLacks
from paceline.base.torch_internals import buffers_of
from paceline.collectives.device_clock import Mark, event_now, module_of
from paceline.measure.records.communication import StrategyResult
from paceline.plan.trials.trial import RankContext, Training, Trial

CPU = torch.device("cpu")


def device_of(trial: Trial, context: RankContext) -> torch.device:
    """Return the device of this rank: the CPU, or the GPU with the number of its local rank.

    Raises EnvironmentLacks if torch can use no GPU, or if a node has fewer GPUs than ranks without
    `oversubscribe`.
    """
    if trial.device == "cpu":
        return CPU
    kind, count = _gpus(context)
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
    return torch.device(kind, context.local_rank % count)


def _gpus(context: RankContext) -> tuple[str, int]:
    """Return torch's name for GPUs, and how many it finds.

    Raises EnvironmentLacks if this torch can use none.
    """
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise EnvironmentLacks(
            f"host {context.host}: device cuda needs a torch with CUDA, torch {torch.__version__} "
            "is built without; install the same version's CUDA build (pytorch.org, Get Started), "
            "or set device = 'cpu'"
        )
    return "cuda", torch.cuda.device_count()


def device_name(device: torch.device) -> str:
    """Return torch's name of the device with its model: "cuda:0 (NVIDIA H200)"."""
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({module_of(device).get_device_name(device)})"


def use_device(device: torch.device, training: Training) -> StrategyResult:
    """Make `device` the current one, and set how cuDNN computes. Return the settings, for the
    records.

    Convolutions of float32 use TF32, with 10 instead of 23 bits of mantissa (PyTorch notes, CUDA
    semantics), where matrix products may. Without autotuning cuDNN sums in the same order each
    time, so runs can be compared.
    """
    if device.type == "cpu":
        return {}
    module_of(device).set_device(device)
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32 = training.float32_matmul_precision != "highest"
    cudnn.deterministic = not training.cudnn_autotuning
    cudnn.benchmark = training.cudnn_autotuning
    return {
        "device": device_name(device),
        "tf32": cudnn.allow_tf32,
        "cudnn_deterministic": cudnn.deterministic,
    }


def synchronize(device: torch.device) -> None:
    """Wait until all submitted work of `device` is done."""
    if device.type != "cpu":
        module_of(device).synchronize(device)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, where its parameters and buffers stay the same tensors.

    nn.Module.to replaces buffers. Blocks that torch.fx made of the model would keep the old ones.
    """
    buffers = [
        (layer, name, buffer)
        for layer in model.modules()
        for name, buffer in buffers_of(layer).items()
        if buffer is not None
    ]
    model.to(device)
    for layer, name, buffer in buffers:
        moved = buffers_of(layer)[name]
        assert moved is not None, "it was there before"
        buffer.data = moved.data
        buffers_of(layer)[name] = buffer


@contextmanager
def lent_to(device: torch.device, module: nn.Module) -> Iterator[None]:
    """Compute with a module on a device; afterwards its tensors are what and where they were."""
    tensors = [*module.parameters(), *module.buffers()]
    before = [tensor.data for tensor in tensors]
    move_model(module, device)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name in CPU memory; tensors already there are not copied."""
    return {name: tensor.detach().to(CPU) for name, tensor in tensors.items()}


class InputMover:
    """Copies tensors of the host to a device; on the CPU they stay where they are.

    A GPU has a stream of its own for that. So copies wait for no running computation, and
    computations wait only for their own copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None if device.type == "cpu" else module_of(device).Stream(device)

    def move(self, host: Tensor) -> Tensor:
        """Return a tensor on the device in the same memory format. It returns at once.

        A GPU reads pinned memory directly. torch reuses it for later tensors, but only after the
        copy is done. So the host may fill the next batch while the last one is still copied.
        """
        return host if self._stream is None else self.move_pinned(host.pin_memory())

    def move_pinned(self, host: Tensor) -> Tensor:
        """Return a tensor in pinned memory on the device in the same memory format.

        It returns at once; work submitted later to the current stream waits for the copy.
        """
        if self._stream is None:
            return host
        module = module_of(self._device)
        with module.stream(self._stream):
            copied = host.to(self._device, non_blocking=True)
            arrived = self._stream.record_event()
        computing = module.current_stream(self._device)
        computing.wait_event(arrived)
        # The memory belongs to the stream of the copies: keep it until `computing` is done.
        copied.record_stream(computing)
        return copied


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
        event = None if self._device.type == "cpu" else event_now(self._device)
        return Mark(time.perf_counter(), event)

    def reached_s(self, mark: Mark) -> float:
        """Return when the device reached `mark`, as time of perf_counter; waits until then."""
        if mark.event is None or self._started.event is None:
            return mark.host_s
        mark.event.synchronize()
        elapsed_ms = float(self._started.event.elapsed_time(mark.event))
        return self._started.host_s + elapsed_ms / 1000
