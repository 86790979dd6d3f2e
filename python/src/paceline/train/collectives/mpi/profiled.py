"""Operations as torch's profiler shows them: `mpi4py:all_reduce`, from submission to the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.collectives.work import PendingWork

# Where torch's backends call an operation otherwise in a profile than as a method.
_TITLES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}
_AnyWork = TypeVar("_AnyWork", bound="PendingWork")


def shown_in_profile(backend: str, name: str, begin: Callable[[], _AnyWork]) -> _AnyWork:
    """What `begin` gives, as an event of this thread's profiler, if there is one.

    It ends with the work's future, on whichever thread, as those of torch's own backends do. Shapes
    are not shown: Python cannot give them to an event that ends on another thread.
    """
    if not _profiler_enabled():
        return begin()
    with record_function(f"{backend}:{_TITLES.get(name, name)}") as event:
        work = begin()
        event._call_end_callbacks_on_future(work.get_future())  # noqa: SLF001  (RPC's way, too)
    return work
