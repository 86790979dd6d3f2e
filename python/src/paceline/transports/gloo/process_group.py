"""One of torch's own process groups, with a record of what it carries and when.

torch tells nobody outside it when an operation of Gloo begins or ends (its profiler does, for one
stretch of a run and at a price; its flight recorder does not know the end). So the group that torch
is given is a thin one: it notes when this rank asks for an operation, hands it to the group that
torch would have made, and notes the end when the operation's future is done, which is before any
`wait` for it returns. Errors and time limits are the inner group's.

Everything goes to the inner group's own methods, never to `super()`: those hold the GIL while they
call C++, and Gloo's threads, which need it to let go of tensors, would then wait for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from paceline.transports.recorder import begin_operation, is_recording, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Work

    from paceline.transports.recorder import Operation

BACKEND = "recorded-gloo"
_DEVICES = ("cpu", "cuda")  # Gloo stages tensors of a GPU itself

# By the name that torch calls: the name in the records, and which argument is this rank's payload.
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
# Handed on without a record. Messages between two ranks and reduce-scatter have no future in Gloo,
# hence no end that one could be told of; the rest carries nothing.
_OTHERS = (
    "send",
    "recv",
    "recv_anysource",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
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

# Untyped here: torch declares overloads of each operation, of which these take all.
_ProcessGroup: Any = dist.ProcessGroup


class RecordedProcessGroup(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """Does what `inner` does."""

    def __init__(self, inner: dist.ProcessGroup, name: str) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._name = name  # the same on all ranks of the group

    def _record(self, operation: Operation, work: Work) -> Work:
        def ended(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except RuntimeError:
                return  # whoever waits for the work hears of it
            operation.end()

        work.get_future().add_done_callback(ended)
        return work


def _recorded(method: str, name: str, payload: int | None) -> Callable[..., Work]:
    def call(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Work:
        inner = getattr(self._inner, method)
        if not is_recording():
            work: Work = inner(*arguments, **options)
            return work
        carried = 0 if payload is None else payload_bytes(arguments[payload])
        operation = begin_operation(self._name, self._inner.size(), name, carried)
        return self._record(operation, inner(*arguments, **options))

    return call


def _handed_on(method: str) -> Callable[..., Any]:
    def call(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Any:
        return getattr(self._inner, method)(*arguments, **options)

    return call


for _method, (_name, _payload) in _OPERATIONS.items():
    setattr(RecordedProcessGroup, _method, _recorded(_method, _name, _payload))
for _method in _OTHERS:
    setattr(RecordedProcessGroup, _method, _handed_on(_method))


def _create_group(given: Any, _options: Any) -> RecordedProcessGroup:
    """What torch calls for each group that this rank is in; as torch makes a group of Gloo
    (torch.distributed.distributed_c10d._new_process_group_helper)."""
    backend = ProcessGroupGloo(
        given.store, given.group_rank, given.group_size, timeout=given.timeout
    )
    backend.options.global_ranks_in_group = given.global_ranks_in_group
    backend.options.group_name = given.group_id
    backend._set_sequence_number_for_group()  # noqa: SLF001  (torch's own maker does it)
    inner: Any = dist.ProcessGroup(given.store, given.group_rank, given.group_size)
    group: Any = RecordedProcessGroup(inner, given.group_id)
    kind = dist.ProcessGroup.BackendType.GLOO
    for each in (inner, group):  # the outer one, too, is asked for devices and names
        each._set_default_backend(kind)  # noqa: SLF001  (as above)
        for device in _DEVICES:
            each._register_backend(torch.device(device), kind, backend)  # noqa: SLF001
    inner._set_group_name(given.group_id)  # noqa: SLF001
    recorded: RecordedProcessGroup = group
    return recorded


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=list(_DEVICES))
