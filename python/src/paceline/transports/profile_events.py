"""Events of torch's profiler for operations that are carried out in Python."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.profiler import record_function

from paceline.torch_internals import end_event_with, profiler_enabled

# Names in a profile, where torch's backends use another name than that of the method.
_TITLES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


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
