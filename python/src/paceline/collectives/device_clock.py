"""Times at which a GPU reached points in its work.

A GPU works asynchronously: a call returns before its work is done, so durations are measured by
events in the GPU's queue.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.collectives.errors import EnvironmentLacks

# torch hands out 32 streams of each priority in turn. It uses the priorities 0, -1 and the highest,
# which is -3 on GPUs that have as many (CUDAStream.h).
_UNUSED_PRIORITY = -2
_KNOWN_FOR_S = 1.0  # how long a DeviceClock uses one pair of times of host and GPU
_AT_ONCE_S = 0.001  # a stream without work reaches an event in some microseconds


def module_of(device: torch.device) -> Any:
    """Return torch's module for a GPU's streams, events and settings: torch.cuda."""
    return torch.get_device_module(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a GPU is captured into a graph.

    Events are then part of the graph, and questions about others break the capture.
    """
    return bool(module_of(device).is_current_stream_capturing())


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a device's work."""

    host_s: float  # time.perf_counter() when the program reached it
    event: Any  # in the GPU's queue, of torch.cuda; None on the CPU


def event_now(device: torch.device, stream: Any = None) -> Any:
    """Return an event that follows the work submitted so far to a stream, or to the current one."""
    module = module_of(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device) if stream is None else stream)
    return event


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in the work of a stream of a GPU."""

    event: Any
    before: Mark  # an earlier point, which the GPU had reached at its `host_s`


class DeviceClock:
    """Tells when a GPU reached points in its streams, without a wait for them.

    CUDA measures the time between two events only, on the clock of the GPU, as float32 milliseconds
    (cudaEventElapsedTime). So every point is compared with one whose time on the host's clock is
    known and that is at most `_KNOWN_FOR_S` older than the call of `mark`: where the clocks differ
    by 100 ppm, the error is 0.1 ms.
    """

    def __init__(self, device: torch.device) -> None:
        """Raise EnvironmentLacks where no streams can be had that nothing else uses."""
        self._device = device
        create = module_of(device).Stream
        _, highest = create.priority_range()
        if highest >= _UNUSED_PRIORITY:
            raise EnvironmentLacks(
                f"{device}: expected stream priorities up to {_UNUSED_PRIORITY - 1}, found "
                f"{highest}; times of the GPU cannot be measured"
            )
        self._idle, self._aside = (create(device, priority=_UNUSED_PRIORITY) for _ in range(2))
        self._known: Mark | None = None
        self._compared_s = -math.inf

    def mark(self) -> Moment | None:
        """Mark the end of the work submitted so far to the current stream.

        Return None while the clocks of host and GPU cannot be compared.
        """
        now_s = time.perf_counter()
        if now_s - self._compared_s > _KNOWN_FOR_S:
            self._compared_s = now_s
            self._known = self._reached_now()
        return None if self._known is None else Moment(event_now(self._device), self._known)

    def aside(self) -> AbstractContextManager[Any]:
        """Make a stream the current one in which nothing runs."""
        current: AbstractContextManager[Any] = module_of(self._device).stream(self._aside)
        return current

    def reached_unix_s(self, moment: Moment) -> float | None:
        """Return when the GPU reached the point, in seconds since the epoch; None before that."""
        if not moment.event.query():
            return None
        elapsed_ms = float(moment.before.event.elapsed_time(moment.event))
        return unix_s(moment.before.host_s + elapsed_ms / 1000)

    def _reached_now(self) -> Mark | None:
        """Return a point that the GPU reaches at once; None if it does not.

        Streams may share a queue of the GPU (CUDA_DEVICE_MAX_CONNECTIONS), in which an event can be
        behind an operation that waits for another rank.
        """
        event = event_now(self._device, self._idle)
        limit_s = time.perf_counter() + _AT_ONCE_S
        while not event.query():
            if time.perf_counter() > limit_s:
                return None
        return Mark(time.perf_counter(), event)


def unix_s(moment_s: float) -> float:
    """Convert a time of perf_counter to seconds since the epoch."""
    return time.time() - (time.perf_counter() - moment_s)
