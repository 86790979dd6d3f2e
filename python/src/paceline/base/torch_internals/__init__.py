"""Names of torch without a stable public interface, checked with torch 2.13.

No other module uses such names, but `collectives.torch_internals`, which has those of stores and
process groups. `import torch` loads all of their modules, so nothing here adds to the start of a
rank; names of torch's compiler are in `compiler`, those of FSDP in `fsdp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
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
    "abort_process_groups",
    "all_gather_single",
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


def is_traced() -> bool:
    """Return whether torch compiles or transforms the code that runs: its tensors have no data.

    torch.func transforms it, as by grad and vmap.
    """
    return torch.compiler.is_compiling() or peek_interpreter_stack() is not None


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
