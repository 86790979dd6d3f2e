"""Names of torch's stores and process groups without a stable public interface.

Checked with torch 2.13; `import torch` loads all of their modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._distributed_c10d import (
    GradBucket,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)
from torch._C._dynamo import eval_frame
from torch.autograd.profiler import record_function

__all__ = [
    "GradBucket",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TCPStore",
    "Work",
    "profiler_enabled",
]


# A group written in Python does the following by the methods that torch calls for its own groups
# (torch.distributed.distributed_c10d._new_process_group_helper).


def register_backend(
    group: Any, devices: Iterable[str], kind: dist.ProcessGroup.BackendType, backend: Any
) -> None:
    """Register the backend of a group for each type of device; None if the group is its own."""
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)


def set_default_backend(group: Any, kind: dist.ProcessGroup.BackendType) -> None:
    group._set_default_backend(kind)


def asked_backends() -> dict[str, str]:
    """Return the back end for each device of the group that torch is creating now.

    For a function that torch calls to create it: torch does not tell it, but has it in a variable.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    return {} if config is None else dict(config.get_device_backend_map())


_Class = TypeVar("_Class", bound=type)
_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(kind: _Class) -> _Class:
    """Let torch.compile trace neither the methods of a class nor what they call.

    While it traces the call of a compiled DDP, C++ calls methods of its group and of works, and
    objects of C++ cannot be traced. torch.compiler.disable does the same, but imports Dynamo.
    """
    for value in vars(kind).values():
        if hasattr(value, "__code__"):
            eval_frame.set_code_exec_strategy(value.__code__, _SKIPPED)
    return kind


def limit_of(options: Any) -> float:
    """Return the limit in seconds that the options of a group of Gloo have now."""
    return float(options._timeout.total_seconds())


def set_group_name(group: Any, name: str) -> None:
    group._set_group_name(name)


def is_nccl(group: Any, device: torch.device) -> bool:
    """Return whether NCCL carries out the operations of a group with tensors on a device."""
    kind = getattr(dist.distributed_c10d, "ProcessGroupNCCL", None)
    try:
        return kind is not None and isinstance(group._get_backend(device), kind)
    except RuntimeError:  # the group has no back end for this device
        return False


def is_coalescing(group: Any) -> bool:
    """Return whether the operations of a group are collected, to be submitted together."""
    return group in dist.distributed_c10d._world.pg_coalesce_state


def surround_method(
    owner: type,
    name: str,
    before: Callable[[Any, tuple[Any, ...]], Any],
    after: Callable[[Any, Any], Any],
) -> None:
    """Let a method of a class of torch, which is C++, call functions before and after itself.

    before: gets the object and the arguments. after: gets what `before` has returned, and the
    result of the method, unless that raises.
    """
    method = getattr(owner, name)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        begun = before(self, arguments)
        result = method(self, *arguments, **named)
        after(begun, result)
        return result

    # In an object of a subclass in Python, C++ looks for the method in Python, and finds this one
    # unless its caller is a function of that name for the same object (get_type_override of
    # pybind11). With another name the two would call each other without end.
    call.__code__ = call.__code__.replace(co_name=name)
    setattr(owner, name, functools.wraps(method)(call))


def source_rank(work: Work) -> int:
    """Return the rank whose message a completed `recv_anysource` received."""
    return work._source_rank()


def factor_of(reduce_op: Any) -> Any:
    """Return the factor of a PREMUL_SUM, which torch exposes only in the pickled state."""
    _, factor = reduce_op.__getstate__()
    return factor


def shared_descriptor(tensor: torch.Tensor) -> int:
    """Move the memory of a tensor, and so all of its views, into shared memory of the kernel.

    Return its file descriptor, which the memory keeps open. Raises RuntimeError if that cannot be.
    """
    descriptor, _size = tensor.untyped_storage()._share_fd_cpu_()
    return int(descriptor)


def end_event_with(event: record_function, ended: torch.futures.Future[None]) -> None:
    """Let an event of the profiler last until the future is done, as torch's RPC does."""
    event._call_end_callbacks_on_future(ended)
