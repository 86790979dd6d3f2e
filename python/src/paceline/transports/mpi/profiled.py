"""Operations as torch's profiler shows them: `mpi4py:all_reduce`, from submission to the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

if TYPE_CHECKING:
    from collections.abc import Callable

# Where torch's backends call an operation otherwise in a profile than as a method.
_TITLES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}


def begin_in_profile(backend: str, name: str) -> Callable[[], None]:
    """Begin an event of this thread's profiler, if there is one; ended by calling what returns.

    Any thread may end it, and must before it lets anybody know of the operation's end: a profiler
    that stops while an event ends brings the process down. Shapes are not shown: Python cannot give
    them to an event that ends on another thread.
    """
    if not _profiler_enabled():
        return lambda: None
    ended: torch.futures.Future[None] = torch.futures.Future()
    with record_function(f"{backend}:{_TITLES.get(name, name)}") as event:
        event._call_end_callbacks_on_future(ended)  # noqa: SLF001  (as torch's RPC does)
    return lambda: ended.set_result(None)
