"""Gloo's process group of torch, wrapped to record its operations.

torch does not report when an operation of Gloo begins or ends: its profiler does so only for a part
of a run and at a cost, and its flight recorder does not know the end. So torch gets a thin process
group. It records when this rank submits an operation, passes it to the group that torch would have
created, and records the end when the operation's future is done, before any `wait` for it returns.
Reduce-scatter has no future in Gloo, so its end is that of the first `wait` for it. Errors and
limits are those of the inner group.

All calls go to the methods of the inner group, never to `super()`: the latter hold the GIL while
they call C++, and Gloo's threads, which need the GIL to release tensors, would wait for ever.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.torch_internals import (
    ProcessGroupGloo,
    Work,
    number_operations,
    register_backend,
    set_default_backend,
    set_group_name,
)
from paceline.transports.recorder import Operation, begin_operation, is_recording, payload_bytes

BACKEND = "recorded-gloo"
_DEVICES = ("cpu", "cuda")  # Gloo stages tensors of a GPU itself

# Method of torch -> (name in the records, index of the argument with this rank's payload).
_OPERATIONS = {
    "allreduce": ("allreduce", 0),
    "allreduce_coalesced": ("allreduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("allgather", 1),
    "allgather_coalesced": ("allgather", 1),
    "allgather_into_tensor_coalesced": ("allgather", 1),
    "all_gather_single": ("allgather", 1),
    "all_gather_single_coalesced": ("allgather", 1),
    "_allgather_base": ("allgather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("alltoall", 1),
    "alltoall_base": ("alltoall", 1),
    "all_to_all_single": ("alltoall", 1),
    "barrier": ("barrier", None),
}
# Those without a future.
_REDUCE_SCATTERS = (
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
)
# Passed on without a record. Point-to-point messages have no future in Gloo, and may be waited for
# late or never, so their end is unknown; the others transfer nothing.
_OTHERS = (
    "send",
    "recv",
    "recv_anysource",
    "monitored_barrier",
    "get_group_store",
    "set_timeout",
    "abort",
    "shutdown",
    "_start_coalescing",
    "_end_coalescing",
    "_set_sequence_number_for_group",
    "_get_sequence_number_for_group",
    "_wait_for_pending_works",
)

# Untyped: torch declares overloads of each operation; these methods accept all of them.
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = Work


class _WaitedWork(_Work):  # type: ignore[misc]  # subclasses Any, see above
    """An operation of Gloo without a future; the first wait for it records its end."""

    def __init__(self, inner: Work, operation: Operation) -> None:
        super().__init__()
        self._inner = inner
        self._operation: Operation | None = operation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        ended = self._inner.wait(timeout)
        operation, self._operation = self._operation, None
        if operation is not None:
            operation.end()
        return ended

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()


class RecordedProcessGroup(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A process group that passes all operations to `inner` and records them."""

    def __init__(self, inner: dist.ProcessGroup, name: str) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._name = name  # the same on all ranks of the group


def _end_with_future(work: Work, operation: Operation) -> Work:
    def ended(future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except RuntimeError:
            return  # the thread that waits for the work gets the error
        operation.end()

    work.get_future().add_done_callback(ended)
    return work


def _recorded(
    method: str,
    name: str,
    payload: int | None,
    end_with: Callable[[Work, Operation], Work] = _end_with_future,
) -> Callable[..., Work]:
    def call(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Work:
        inner = getattr(self._inner, method)
        if not is_recording():
            work: Work = inner(*arguments, **options)
            return work
        carried = 0 if payload is None else payload_bytes(arguments[payload])
        operation = begin_operation(self._name, self._inner.size(), name, carried)
        return end_with(inner(*arguments, **options), operation)

    return call


def _handed_on(method: str) -> Callable[..., Any]:
    def call(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Any:
        return getattr(self._inner, method)(*arguments, **options)

    return call


for _method, (_name, _payload) in _OPERATIONS.items():
    setattr(RecordedProcessGroup, _method, _recorded(_method, _name, _payload))
for _method in _REDUCE_SCATTERS:
    _call = _recorded(_method, "reduce_scatter", 1, _WaitedWork)
    setattr(RecordedProcessGroup, _method, _call)
for _method in _OTHERS:
    setattr(RecordedProcessGroup, _method, _handed_on(_method))


def _create_group(given: Any, _options: Any) -> RecordedProcessGroup:
    """Create a group as torch creates one of Gloo; torch calls this for each group with this rank.

    See torch.distributed.distributed_c10d._new_process_group_helper.
    """
    backend = ProcessGroupGloo(
        given.store, given.group_rank, given.group_size, timeout=given.timeout
    )
    backend.options.global_ranks_in_group = given.global_ranks_in_group
    backend.options.group_name = given.group_id
    number_operations(backend)
    inner: Any = dist.ProcessGroup(given.store, given.group_rank, given.group_size)
    group: Any = RecordedProcessGroup(inner, given.group_id)
    kind = dist.ProcessGroup.BackendType.GLOO
    for each in (inner, group):  # torch reads devices and names of the outer one as well
        set_default_backend(each, kind)
        register_backend(each, _DEVICES, kind, backend)
    set_group_name(inner, given.group_id)
    # Never freed: its destructor waits for Gloo's threads and holds the GIL, for which one of them
    # may wait to release a callback. The last reference is often that of a user's model.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))
    recorded: RecordedProcessGroup = group
    return recorded


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=list(_DEVICES))
