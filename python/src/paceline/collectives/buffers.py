"""Present tensors as flat memory of the host, which transports can send and reduce.

A buffer is the tensor's own memory if that is contiguous, otherwise a copy. `copy_back` writes
results from the copy into the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline.collectives.device_clock import module_of
from paceline.collectives.torch_internals import factor_of


def check_dense(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if a tensor is not dense (for example sparse)."""
    for tensor in tensors:
        if not is_dense(tensor):
            raise ValueError(
                f"expected dense tensors, got one of layout {tensor.layout}; "
                "make it dense with .to_dense() first"
            )


def wire_buffer(tensor: Tensor) -> Tensor:
    """Return all elements of `tensor` as a flat tensor on the host: a view if possible."""
    return on_host(flattened(tensor.detach().resolve_conj().resolve_neg()))


def flattened(tensor: Tensor) -> Tensor:
    """Return all elements consecutively in memory, as a view if they are stored so.

    `torch.reshape` can return views with strides, and it treats any stride of a tensor with at most
    one element as contiguous. numpy and MPI do not.
    """
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor, or its copy in host memory; the copy of a GPU's tensor is pinned."""
    if is_on_host(tensor):
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
    return copy.copy_(tensor)


def copy_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy `flat` into `tensor` unless both use the same memory."""
    if flat.data_ptr() != tensor.data_ptr() or flat.dtype != tensor.dtype:
        tensor.detach().copy_(flat.view(tensor.shape))


def byte_view(flat: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a flat tensor as a numpy array of bytes."""
    return array_of(flat.view(torch.uint8))


def array_of(flat: Tensor) -> NDArray[Any]:
    """Return the memory of a flat tensor of the host as a numpy array.

    `Tensor.numpy` would forbid torch to resize that memory, which FSDP does.
    """
    if not flat.numel():
        return np.empty(0, _numpy_type(flat.dtype))
    return np.asarray(_Memory(flat))


class _Memory:
    """The memory of a tensor, by numpy's array interface; keeps the tensor."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(flat.shape),
            "typestr": _numpy_type(flat.dtype).str,
            "data": (flat.data_ptr(), False),
        }


@cache
def _numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Copy all elements of the tensors into one flat tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def flattened_if_alike(tensors: list[Tensor]) -> list[Tensor]:
    """Concatenate tensors of one type and device, so that one operation suffices; otherwise return
    `tensors`."""
    if len(tensors) > 1 and len({(t.dtype, t.device) for t in tensors}) == 1:
        return [concatenated(tensors)]
    return tensors


def scatter_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive parts of a flat tensor into `tensors`, each of its own size."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        copy_back(part, tensor)


def device_wait(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return a function that waits until devices have done all work that this thread submitted so
    far.

    Only the devices of `tensors` count. Call this function on the submitting thread, because each
    thread has its own stream.
    """
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    events = [module_of(device).current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


# --- reductions: torch's operations as numpy arithmetic on flat memory of the host ---------------

_Result = TypeVar("_Result")

_ReduceOp: Any = dist.ReduceOp  # its members are of another type than the options' values

# torch's reduction, its arithmetic, and that on 0 and 1 for booleans (a sum is true if any value
# is).
_OPERATIONS: tuple[tuple[Any, np.ufunc, np.ufunc | None], ...] = (
    (_ReduceOp.SUM, np.add, np.maximum),
    (_ReduceOp.AVG, np.add, None),  # divided afterwards
    (_ReduceOp.PREMUL_SUM, np.add, None),  # multiplied before
    (_ReduceOp.PRODUCT, np.multiply, np.minimum),
    (_ReduceOp.MIN, np.minimum, np.minimum),
    (_ReduceOp.MAX, np.maximum, np.maximum),
    (_ReduceOp.BAND, np.bitwise_and, np.bitwise_and),
    (_ReduceOp.BOR, np.bitwise_or, np.bitwise_or),
    (_ReduceOp.BXOR, np.bitwise_xor, np.bitwise_xor),
)
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_ORDERED = (np.minimum, np.maximum)
_HALVES = (torch.bfloat16, torch.float16)
# Open MPI's sums of these types saturate (ompi/mca/op/avx); torch's sums wrap around.
_NARROW = (torch.int8, torch.uint8, torch.int16)
_SCALED = (_ReduceOp.AVG, _ReduceOp.PREMUL_SUM)
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_OVERFLOWING = (np.add, np.multiply)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Arithmetic of two contributions, with the conversion of the values before and after it."""

    ufunc: np.ufunc
    factor: Any = None  # number or tensor by which every rank's values are multiplied first
    average: bool = False

    @property
    def name(self) -> str:
        """The arithmetic in a word, for messages."""
        if self.average:
            return "average"
        return self.ufunc.__name__ if self.factor is None else "scaled sum"

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """Return the type in which values of type `given` are reduced."""
        if given in _HALVES:
            return torch.float32
        if given == torch.bool:
            return torch.uint8
        if given in _NARROW and self.ufunc in _OVERFLOWING:
            return torch.int32
        return given

    def begin(self, tensor: Tensor) -> Tensor:
        """Return the values of `tensor`, flat, on the host, in a type that numpy and MPI reduce.

        bfloat16 and float16 are reduced as float32 and rounded once, bool as uint8, sums and
        products of 8 and 16 bits as int32. The result is a view of the tensor if no conversion is
        needed.
        """
        dtype = self.dtype(tensor.dtype)
        converted = dtype != tensor.dtype
        flat = flattened(tensor.detach().to(dtype)) if converted else wire_buffer(tensor)
        flat = on_host(flat)
        return flat if self.factor is None else flat * self.factor

    def end(self, flat: Tensor, size: int) -> None:
        """Divide the sum over `size` ranks if an average was requested."""
        if not self.average:
            return
        if flat.dtype.is_floating_point or flat.dtype.is_complex:
            flat.div_(size)
        else:
            flat.div_(size, rounding_mode="trunc")


def reduction_of(reduce_op: Any, dtype: torch.dtype) -> Reduction:
    """Return the arithmetic of torch's reduction. Raises ValueError if the type has none."""
    kind = getattr(reduce_op, "op", reduce_op)
    found = _reduction(kind, dtype)
    if found is None:
        raise ValueError(f"no reduction {reduction_name(reduce_op)} for {dtype}")
    return replace(found, factor=factor_of(reduce_op)) if kind == _ReduceOp.PREMUL_SUM else found


@cache
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction | None:
    """Return the arithmetic of a reduction, without its factor; None if the type has none."""
    if kind in _SCALED and dtype in _WIDE_UNSIGNED:
        return None  # torch cannot divide or multiply them
    for theirs, ours, of_booleans in _OPERATIONS:
        ufunc = of_booleans if dtype == torch.bool else ours
        if kind == theirs and ufunc is not None and _defined(ufunc, dtype):
            return Reduction(ufunc, average=theirs == _ReduceOp.AVG)
    return None


def _defined(ufunc: np.ufunc, dtype: torch.dtype) -> bool:
    if dtype == torch.complex32 or (dtype.is_floating_point and dtype.itemsize == 1):
        return False  # neither MPI nor numpy has them
    if ufunc in _BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (ufunc in _ORDERED and dtype.is_complex)


def reduction_name(reduce_op: Any) -> str:
    """Return the name of a reduction, given as torch's ReduceOp or as its member."""
    return str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2]


def reduce_tensors(
    tensors: list[Tensor],
    reductions: Sequence[Reduction],
    reduce: Callable[[NDArray[Any], np.ufunc], _Result],
    ranks: int,
) -> list[_Result]:
    """Reduce each tensor in place, or all in one message if they are alike.

    reductions: of each tensor. reduce: reduces a flat array over all ranks in place. Return what it
    returned for each message.
    """
    buffers = flattened_if_alike(tensors)
    results = []
    for tensor, reduction in zip(buffers, reductions, strict=False):  # perhaps one buffer
        flat = reduction.begin(tensor)
        results.append(reduce(array_of(flat), reduction.ufunc))
        reduction.end(flat, ranks)
        copy_back(flat, tensor)
    if buffers is not tensors:
        scatter_into(buffers[0], tensors)
    return results


def reduce_in_order(
    own: NDArray[Any], rank: int, others: dict[int, NDArray[Any]], ufunc: np.ufunc
) -> None:
    """Reduce all ranks' contributions in the order of the ranks into `own`; may overwrite `others`.

    The fixed order makes the result bit-identical wherever it is computed.
    """
    contributions = {**others, rank: own}
    first, *rest = sorted(contributions)
    result = contributions[first]
    for contributor in rest:
        contribution = contributions[contributor]
        # Elements of `own` must not be overwritten before they are used.
        target = own if contribution is own or result is own else result
        with np.errstate(all="ignore"):  # infinities and NaN are the user's, as in torch
            ufunc(result, contribution, out=target)
        result = target
