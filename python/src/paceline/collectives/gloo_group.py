"""Gloo's process group of torch, wrapped to record its operations.

torch does not report when an operation of Gloo begins or ends: its profiler does so only for a part
of a run and at a cost, and its flight recorder does not know the end. So torch gets a thin process
group. It records when this rank submits an operation, passes it to the group that torch would have
created, and records the end when the operation's future is done, before any `wait` for it returns.
Messages between two ranks and reduce-scatter have no future in Gloo: they end when the wait for
them returns. Errors and limits are those of the inner group.

All calls go to the methods of the inner group, never to `super()`: the latter hold the GIL while
they call C++, and Gloo's threads, which need the GIL to release tensors, would wait for ever.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives.errors import UsageError
from paceline.collectives.recorder import Operation, begin_operation, is_recording, payload_bytes
from paceline.collectives.torch_internals import (
    ProcessGroupGloo,
    Store,
    Work,
    asked_backends,
    register_backend,
    set_default_backend,
    set_group_name,
    source_rank,
    untraced,
)

BACKEND = "recorded-gloo"
DEVICES = ("cpu", "cuda")  # Gloo stages tensors of a GPU itself

_RELEASE_S = 0.1  # they need microseconds, and the GIL

# Method of torch 2.9 to 2.14 -> (name in the records, index of the argument with this rank's
# payload).
OPERATIONS = {
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
    "gather_single": ("gather", 1),
    "gather_into_tensor": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("alltoall", 1),
    "alltoall_base": ("alltoall", 1),
    "all_to_all_single": ("alltoall", 1),
    "barrier": ("barrier", None),
}
# These have no future in Gloo.
REDUCE_SCATTERS = (
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
)
# Method of torch -> (name in the records, sender and receiver). {other}: the second argument.
MESSAGES = {
    "send": ("send", "{own}->{other}"),
    "recv": ("recv", "{other}->{own}"),
    "recv_anysource": ("recv", "*->{own}"),
}
# Passed on without a record: they transfer nothing.
_OTHERS = (
    "monitored_barrier",
    "get_group_store",
    "set_timeout",
    "abort",
    "shutdown",
    "reconfigure",
    "get_reconfigure_handle",
    "register_pre_hook",
    "register_post_hook",
    "register_abort_hook",
    "unregister_pre_hook",
    "unregister_post_hook",
    "unregister_abort_hook",
    "new_window",
    "_add_ephemeral_timeout",
    "_start_coalescing",
    "_end_coalescing",
    "_get_sequence_number_for_group",
    "_wait_for_pending_works",
)

# Untyped: torch declares overloads of each operation; these methods accept all of them. Its stub
# does not describe how to subclass a work.
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = Work


@untraced
class AwaitedWork(_Work):  # type: ignore[misc]  # subclasses Any, see above
    """A work of Gloo without a future. Its operation ends when a wait for it returns."""

    def __init__(self, inner: Work, operation: Operation) -> None:
        super().__init__()
        self._inner = inner
        self._operation: Operation | None = operation

    def wait(self, *arguments: Any, **options: Any) -> bool:
        result = self._inner.wait(*arguments, **options)
        operation, self._operation = self._operation, None
        if operation is not None:
            operation.end()
        return result

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[Any]:
        return self._inner.result()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._inner.get_future()

    def _source_rank(self) -> int:
        return source_rank(self._inner)


class RecordedProcessGroup(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A process group that passes all operations to `inner` and records them."""

    def __init__(self, inner: dist.ProcessGroup, name: str) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner: Any = inner
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


def numbered_in(
    name: str, group: dist.ProcessGroup, peers: str | None, arguments: tuple[Any, ...]
) -> tuple[str, int]:
    """Return the name under which an operation of a group is numbered, and its number of ranks.

    peers: sender and receiver of a message, as in `MESSAGES`; None for a collective.
    """
    if peers is None:
        return name, group.size()
    # Only two ranks take part, so messages are numbered separately from collectives.
    return f"{name}/{peers.format(own=group.rank(), other=arguments[1])}", 2


def _recorded(
    method: str,
    name: str,
    payload: int | None,
    end_with: Callable[[Work, Operation], Work] = _end_with_future,
    peers: str | None = None,
) -> Callable[..., Work]:
    """peers: sender and receiver of a message between two ranks; None for a collective."""

    def call(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Work:
        inner = getattr(self._inner, method)
        if not is_recording():
            work: Work = inner(*arguments, **options)
            return work
        carried = 0 if payload is None else payload_bytes(arguments[payload])
        group, ranks = numbered_in(self._name, self._inner, peers, arguments)
        operation = begin_operation(group, ranks, name, carried)
        return end_with(inner(*arguments, **options), operation)

    return call


def _handed_on(method: str) -> Callable[..., Any]:
    def call(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Any:
        return getattr(self._inner, method)(*arguments, **options)

    return call


for _method, (_name, _payload) in OPERATIONS.items():
    setattr(RecordedProcessGroup, _method, _recorded(_method, _name, _payload))
for _method in REDUCE_SCATTERS:
    setattr(RecordedProcessGroup, _method, _recorded(_method, "reduce_scatter", 1, AwaitedWork))
for _method, (_name, _peers) in MESSAGES.items():
    setattr(RecordedProcessGroup, _method, _recorded(_method, _name, 0, AwaitedWork, _peers))
for _method in _OTHERS:
    setattr(RecordedProcessGroup, _method, _handed_on(_method))
untraced(RecordedProcessGroup)


def check_asked(backend: str) -> None:
    """Raise UsageError if torch was asked for another back end for some device, too.

    torch would leave out the other one without a word, for a group written in Python has all
    devices.
    """
    asked = asked_backends()
    others = sorted({other for other in asked.values() if other != backend})
    if others:
        text = ",".join(f"{device}:{each}" for device, each in asked.items())
        raise UsageError(
            f'back end "{text}": expected "{backend}" for all devices, got {", ".join(others)} '
            f"too. Create two groups: init_process_group({others[0]!r}), and for the other device "
            f"new_group(backend={backend!r})"
        )


def create_gloo(given: Any, store: Store) -> tuple[ProcessGroupGloo, Any]:
    """Return a backend of Gloo and a group around it, as torch creates one of Gloo.

    given: what torch tells an extended backend about the group. See
    torch.distributed.distributed_c10d._new_process_group_helper. store: used by this group only.
    """
    backend = ProcessGroupGloo(store, given.group_rank, given.group_size, timeout=given.timeout)
    backend.options.global_ranks_in_group = given.global_ranks_in_group
    backend.options.group_name = given.group_id
    inner: Any = dist.ProcessGroup(store, given.group_rank, given.group_size)
    register_gloo(inner, backend)
    set_group_name(inner, given.group_id)
    # Not freed before `release_gloo`: its destructor waits for Gloo's threads, and holds the GIL if
    # it is called from C++, while one of them may wait for it to release a tensor or a callback.
    # The last reference is often that of a user's model, in C++.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))
    return backend, inner


def release_gloo(inner: Any, used_s: float) -> None:
    """Let a group from `create_gloo` be freed, all of whose operations have ended.

    used_s: when the last of them ended, by time.monotonic(). Waits until Gloo's threads have
    released the tensors of that one, too: no longer than _RELEASE_S, and not at all if it was
    earlier.
    """
    time.sleep(max(0.0, used_s + _RELEASE_S - time.monotonic()))
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(inner))


def register_gloo(group: Any, backend: ProcessGroupGloo) -> None:
    """Let torch find the backend of a group; it reads devices and names of the outer one too."""
    kind = dist.ProcessGroup.BackendType.GLOO
    set_default_backend(group, kind)
    register_backend(group, DEVICES, kind, backend)


def _create_group(given: Any, _options: Any) -> RecordedProcessGroup:
    """Create a group; torch calls this for each group with this rank."""
    backend, inner = create_gloo(given, given.store)
    group = RecordedProcessGroup(inner, given.group_id)
    register_gloo(group, backend)
    return group


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=list(DEVICES))
