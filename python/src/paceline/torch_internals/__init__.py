"""Names of torch without a stable public interface, checked with torch 2.13.

No other module uses such names. `import torch` loads all of their modules, so nothing here adds to
the start of a rank; names of torch's compiler are in `compiler`, those of FSDP in `fsdp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._distributed_c10d import (
    GradBucket,
    HashStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.profiler import record_function
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_groups
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormLayer
from torch.nn.modules.dropout import _DropoutNd as DropoutLayer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

__all__ = [
    "BatchNormLayer",
    "DataLoaderIterator",
    "DropoutLayer",
    "FakeTensor",
    "FakeTensorMode",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TCPStore",
    "Work",
    "abort_process_groups",
    "all_gather_single",
    "profiler_enabled",
    "reduce_scatter_single",
    "tree_leaves",
]


# torch 2.13 has new names for these.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class RandomOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation that draws random numbers while it is active.

    Only for tensors on the meta device: elsewhere, fused attention counts also without dropout.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.first is None and torch.Tag.nondeterministic_seeded in func.tags:
            self.first = func.__name__.partition(".")[0]
        return func(*args, **(kwargs or {}))


class NewTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the tensors that operations create while it is active.

    replaced: returns a tensor to use in place of a new one. used: called with every tensor that an
    operation has read or written.
    """

    def __init__(
        self, replaced: Callable[[Tensor], Tensor], used: Callable[[Tensor], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replaced, self._used = replaced, used

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = {storage_number(each) for each in given}

        def new(result: Tensor) -> Tensor:
            return result if storage_number(result) in known else self._replaced(result)

        found = tree_map_only(Tensor, new, func(*args, **kwargs))
        for each in given:
            self._used(each)
        return found


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


def end_event_with(event: record_function, ended: torch.futures.Future[None]) -> None:
    """Let an event of the profiler last until the future is done, as torch's RPC does."""
    event._call_end_callbacks_on_future(ended)


def exclude_from_ddp(module: nn.Module, names: list[str]) -> None:
    """Let a later DistributedDataParallel ignore these parameters of the module."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        module, names
    )


def call_after_backward(function: Callable[[], None]) -> None:
    """Call the function at the end of the backward pass that runs in this thread."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def storage_number(tensor: Tensor) -> int:
    """Return a number of the memory of a tensor, which its views have too."""
    number: int = tensor.untyped_storage()._cdata
    return number


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules of a module; `named_children` leaves out one that is used again."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module itself; changes of the dictionary change the module."""
    return module._buffers
