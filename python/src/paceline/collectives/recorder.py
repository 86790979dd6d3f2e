"""Notes of communication: each operation of each process group, reported between two steps.

Operations that are carried out in Python are shown to torch's profiler, too, which sees others by
itself.

torch creates process groups from a registry, so they find the recorder of this process in this
module instead of receiving it. Without an active recorder, an operation costs one function call.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from paceline.collectives.torch_internals import end_event_with, profiler_enabled

# Sum of gradients in memory shared by the ranks of a node or the threads of a rank.
SHARED_REDUCE = "shared_reduce"
_KEPT = 4096  # operations kept between two flushes; one beyond that reports them itself
_KEPT_ON_DEVICE = 16384  # operations of a GPU kept between two flushes; others are not recorded
# Names in a profile, where torch's backends use another name than that of the method.
_TITLES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}

# Returns when a GPU reached begin and end of an operation, in unix seconds; None before that.
Times = Callable[[], tuple[float, float] | None]


@dataclass(kw_only=True)
class Operation:
    """One operation of this rank.

    The same (group, sequence) on all ranks of a group is the same operation. Times are on the clock
    of this host.
    """

    group: str  # its name; the same on all of its ranks
    ranks: int  # of the group
    operation: str  # as torch names it: "allreduce"
    payload_bytes: int  # of this rank's tensors
    arrived_unix_s: float  # when this rank requested it
    ended_unix_s: float = math.nan  # while it is in flight
    sequence: int = 0  # within the group
    started_unix_s: float | None = None  # start, where operations of a group queue
    algorithm: str | None = None  # None where there is no choice
    sent_bytes: int | None = None  # by this rank to others; None where they are not counted
    sent_messages: int | None = None
    awaited: bool = False  # whether the rank does nothing else until it ends

    def start(self) -> None:
        """Record that its turn has come: operations queued before it in its group have ended."""
        self.started_unix_s = time.time()

    def end(self) -> None:
        """Record that it has ended now. An operation that fails is not recorded."""
        recorder = _in_use
        if recorder is not None:
            self.ended_unix_s = time.time()
            recorder.add(self)

    def end_on_device(self, times: Times) -> None:
        """Record it once a GPU has reached its end."""
        if _in_use is not None:
            _in_use.add_later(self, times)


# Gets operations that have ended.
Report = Callable[[Sequence[Operation]], None]


class Notes(Protocol):
    """Notes which operations are in flight, at once; a note must not wait."""

    def begun(self, group: str, operation: str, sequence: int, unix_s: float) -> None: ...

    def ended(self, group: str) -> None: ...


class Recorder:
    """Keeps ended operations until `flush`, so that no operation waits for a disk."""

    def __init__(self, report: Report, notes: Notes | None = None) -> None:
        """report: gets the operations that have ended, with each flush."""
        self._report = report
        self._notes = notes
        self._lock = threading.Lock()
        self._ended: list[Operation] = []
        self._sequences: dict[str, int] = {}
        self._on_device: list[tuple[Operation, Times]] = []  # no flush has seen their end

    def begin(self, operation: Operation, *, is_noted: bool) -> None:
        """Number an operation within its group, and note it."""
        group = operation.group
        with self._lock:
            operation.sequence = self._sequences.get(group, 0)
            self._sequences[group] = operation.sequence + 1
            if is_noted and self._notes is not None:
                arrived_unix_s = operation.arrived_unix_s
                self._notes.begun(group, operation.operation, operation.sequence, arrived_unix_s)

    def add(self, operation: Operation) -> None:
        with self._lock:
            if self._notes is not None:
                self._notes.ended(operation.group)
            self._ended.append(operation)
            if len(self._ended) >= _KEPT:
                self._report_ended()

    def add_later(self, operation: Operation, times: Times) -> None:
        """Add an operation of a GPU at the first flush after its end."""
        with self._lock:
            if len(self._on_device) < _KEPT_ON_DEVICE:
                self._on_device.append((operation, times))

    def forget_on_device(self) -> None:
        """Do not record the operations of a GPU whose end no flush has seen."""
        with self._lock:
            self._on_device = []

    def ended(self) -> list[Operation]:
        """Return the operations that have ended since the last flush.

        Those of a GPU are not among them: their times are not those of the calls.
        """
        with self._lock:
            return list(self._ended)

    def flush(self) -> None:
        """Report the operations that have ended; the thread that trains calls it."""
        with self._lock:
            asked, self._on_device = self._on_device, []
            for operation, times in asked:
                reached = times()
                if reached is None:
                    self._on_device.append((operation, times))
                else:
                    operation.arrived_unix_s, operation.ended_unix_s = reached
                    self._ended.append(operation)
            self._report_ended()

    def _report_ended(self) -> None:
        ended, self._ended = self._ended, []
        self._report(ended)

    def close(self) -> None:
        """Report the rest; later ends of operations are not noted."""
        self.flush()
        with self._lock:
            self._notes = None


_in_use: Recorder | None = None


@contextmanager
def reporting(report: Report, notes: Notes | None = None) -> Iterator[Recorder]:
    """Report every operation of this process while the context is active.

    report: gets the ended ones in order, whenever the recorder is flushed. It must not wait.
    """
    global _in_use  # noqa: PLW0603  (see the module's first lines)
    recorder = _in_use = Recorder(report, notes)
    try:
        yield recorder
    finally:
        _in_use = None
        recorder.close()


@contextmanager
def not_recording() -> Iterator[None]:
    """Record no operation of this process while the context is active."""
    global _in_use  # noqa: PLW0603  (see the module's first lines)
    recorder, _in_use = _in_use, None
    try:
        yield
    finally:
        _in_use = recorder


def is_recording() -> bool:
    """Return whether operations are recorded now."""
    return _in_use is not None


def begin_operation(
    group: str,
    ranks: int,
    name: str,
    payload_bytes: int,
    arrived_unix_s: float | None = None,
    *,
    is_noted: bool = True,
) -> Operation:
    """Return a new operation that this rank reaches now, or at the given time.

    group: name that is equal on all its ranks, which reach its operations in the same order.
    payload_bytes: bytes of this rank's tensors before compression. is_noted: whether `paceline
    stacks` shows it; that would be wrong until the next flush where only a flush sees its end.
    """
    recorder = _in_use
    operation = Operation(
        group=group,
        ranks=ranks,
        operation=name,
        payload_bytes=payload_bytes,
        arrived_unix_s=time.time() if arrived_unix_s is None else arrived_unix_s,
        awaited=is_awaiting(),
    )
    if recorder is not None:
        recorder.begin(operation, is_noted=is_noted)
    return operation


def begin_on_device(group: str, ranks: int, name: str, payload_bytes: int) -> Operation:
    """Return a new operation that a GPU will reach later (`begin_operation` has the arguments)."""
    return begin_operation(group, ranks, name, payload_bytes, math.nan, is_noted=False)


def forget_on_device() -> None:
    """Do not record the operations of a GPU whose end is not known: they are given up."""
    if _in_use is not None:
        _in_use.forget_on_device()


def payload_bytes(tensors: Any) -> int:
    """Return the bytes of a tensor, or of nested lists of tensors."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(payload_bytes(part) for part in tensors)


def begin_profile_event(backend: str, name: str) -> Callable[[], None]:
    """Begin an event of this thread's profiler, if one is active; the returned function ends it.

    The event is shown as `BACKEND:all_reduce`, from submission to the end of the operation. Any
    thread may end it, but must do so before it publishes the end of the operation: a profiler that
    stops while an event ends crashes the process. Shapes are not shown, because Python cannot
    attach them to an event that ends on another thread.
    """
    if not profiler_enabled():
        return lambda: None
    ended: torch.futures.Future[None] = torch.futures.Future()
    with record_function(f"{backend}:{_TITLES.get(name, name)}") as event:
        end_event_with(event, ended)
    return lambda: ended.set_result(None)


# --- descriptions of process groups, for their records -------------------------------------------


class GroupDescription(TypedDict, total=False):
    """Settings of one process group. A key is absent where it does not apply."""

    library: str
    thread_level: str  # of MPI, as are the following
    algorithm: str  # as requested
    all_gather: str  # how long parts are gathered, if any were
    hosts: int
    not_shared: str  # why ranks of a host do not share memory
    by_size: list[dict[str, Any]]  # the chosen algorithm by the size of messages
    calibration_s: dict[str, dict[str, float]]  # measured seconds by algorithm and bytes
    calibration_took_s: float


# --- communication that the layers of a replica wait for within its passes ----------------------
#
# Batch normalisation over all replicas sums its statistics in every forward and backward pass. No
# other work of the rank runs in the meantime, so this time is no computation.

# Returns the sum of a vector (float64) over all replicas, on its device; collective over them.
Total = Callable[[Tensor], Tensor]

_awaits: ContextVar[bool] = ContextVar("paceline_awaits", default=False)  # of each thread


@contextmanager
def awaiting() -> Iterator[None]:
    """Mark that this thread waits for the communication that it requests meanwhile."""
    token = _awaits.set(True)
    try:
        yield
    finally:
        _awaits.reset(token)


def is_awaiting() -> bool:
    """Return whether this thread waits for the communication that it requests now."""
    return _awaits.get()


class PassCommunication:
    """Measures the time that a thread waits for communication: of the layers of one replica, or of
    a step between nodes."""

    def __init__(self) -> None:
        self.total_s = 0.0  # so far

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the time of the block, in which this thread waits for its communication."""
        began_s = time.perf_counter()
        with awaiting():
            yield
        self.total_s += time.perf_counter() - began_s

    def timed(self, total: Total) -> Total:
        """Return `total` with its time measured."""

        def call(values: Tensor) -> Tensor:
            with self.measured():
                return total(values)

        return call
