"""Tensors as buffers that MPI can send and reduce.

MPI gets flat memory: the tensor's own where it is contiguous and MPI can reach it, else a copy.
What MPI has written into a copy goes back into the tensor with `put_back`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

# Open MPI's Allreduce takes a temporary as large as the message. In pieces that stay in the
# caches, 100 MB takes 9 ms instead of 32 to 54 (two ranks in shared memory; 2 to 8 MiB are alike).
PIECE_BYTES = 4 * 2**20

# Any type of the element's size will do to move it; counts in MPI are limited, so not bytes.
_UNITS = {
    1: MPI.BYTE,
    2: MPI.INT16_T,
    4: MPI.INT32_T,
    8: MPI.INT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
_LARGEST_COUNT = 2**31 - 1  # elements: MPI's counts and offsets are ints


def check_dense(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError for a tensor that is more than strided memory (a sparse one, say)."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"transport mpi: expected dense tensors, got one of layout {tensor.layout}; "
                "make it dense with .to_dense() first"
            )


def on_wire(tensor: Tensor) -> Tensor:
    """All elements of `tensor`, flat, where MPI can reach them: a view if possible."""
    flat = flattened(tensor.detach().resolve_conj().resolve_neg())
    return flat if reachable(flat) else host_copy(flat)


def flattened(tensor: Tensor) -> Tensor:
    """All elements, one after the other in memory: a view if they lie so.

    torch's own reshape gives views with strides, and thinks any stride of a single element or of
    none contiguous; numpy and MPI do not.
    """
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,))


def reachable(tensor: Tensor) -> bool:
    """Whether MPI can read and write the tensor where it lies."""
    return tensor.device.type == "cpu" or (tensor.device.type == "cuda" and cuda_aware())


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, pinned if the tensor comes from a device."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor)


def put_back(flat: Tensor, tensor: Tensor) -> None:
    """Make `tensor` hold what `flat` does, unless they are the same memory."""
    if flat.data_ptr() != tensor.data_ptr() or flat.dtype != tensor.dtype:
        tensor.detach().copy_(flat.view(tensor.shape))


def octets(flat: Tensor) -> Any:
    """The memory of a flat tensor as bytes, as mpi4py takes it.

    A numpy array, or a tensor that names its device memory by __cuda_array_interface__.
    """
    raw = flat.view(torch.uint8)
    return raw.numpy() if raw.device.type == "cpu" else raw


def whole(flat: Tensor) -> list[Any]:
    """All of a flat tensor, to be moved by one MPI call."""
    _check_count(len(flat))
    return [octets(flat), len(flat), _UNITS[flat.element_size()]]


def parts(flat: Tensor, lengths: Sequence[int]) -> list[Any]:
    """A flat tensor as consecutive parts of `lengths` elements, one for each rank."""
    _check_count(len(flat))
    offsets = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return [octets(flat), (list(lengths), offsets), _UNITS[flat.element_size()]]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A flat copy of all elements of some tensors, one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def deal_out(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    """Give tensors the consecutive parts, each of its own size, of a flat one."""
    start = 0
    for tensor in tensors:
        end = start + tensor.numel()
        put_back(flat[start:end], tensor)
        start = end


def pieces(buffer: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Consecutive parts, PIECE_BYTES long, of a flat array; of an empty one none."""
    length = max(1, PIECE_BYTES // buffer.itemsize)
    for start in range(0, len(buffer), length):
        yield buffer[start : start + length]


def devices_done(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """What waits until devices have done all that this thread has asked of them so far.

    Of the devices of `tensors`; to be called by the thread that asked, for it has its own stream.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


@cache
def cuda_aware() -> bool:
    """Whether this MPI library says that it takes addresses of CUDA memory.

    Open MPI says it with MPIX_Query_cuda_support; of other libraries nothing is assumed.
    """
    if not MPI.Get_library_version().startswith("Open MPI"):
        return False
    try:
        library = ctypes.CDLL("libmpi.so.40")  # already loaded, so found by its name alone
        return bool(library.MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False


def _check_count(count: int) -> None:
    if count > _LARGEST_COUNT:
        raise ValueError(
            f"transport mpi: one operation moves at most {_LARGEST_COUNT} elements, got {count}; "
            "split the tensor"
        )
