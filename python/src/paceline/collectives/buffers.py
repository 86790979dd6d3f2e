"""Present tensors as flat memory of the host, which transports can send and reduce.

A buffer is the tensor's own memory if that is contiguous, otherwise a copy. `copy_back` writes
results from the copy into the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.collectives.device_clock import module_of


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
