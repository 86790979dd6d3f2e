"""Record the memory of tensors during a computation, real or with fake tensors."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from paceline.training.heap import PASS_ENDED, HeapEvent
from paceline.training.tensors import storage_number

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default

# oneDNN takes the channels of the first layer's images as they are.
_FIRST_CHANNELS = 5


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Storages that operations create meanwhile: when they begin and end to exist.

    Views of storages from before are not counted. Convolutions also count the copies that oneDNN
    makes of their operands in its blocked format: channels in blocks of one vector register (oneDNN
    documentation, "Understanding memory formats"). The order in which they come and go is that of
    recorded allocations (torch 2.13, oneDNN on x86-64).
    Attributes: `now` and `peak` in bytes, and `events` in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.events: list[HeapEvent] = []
        self._blocks = 0
        self._sizes: dict[int, int] = {}  # by block
        self._storages: dict[int, int] = {}  # blocks of storages that exist, by storage

    def reset_peak(self) -> None:
        self.peak = self.now

    def end_pass(self) -> None:
        """Note the end of a backward pass, after which others follow."""
        self.events.append(PASS_ENDED)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _FORWARD:
            return self._convolution(func, args)
        if func is _BACKWARD:
            return self._convolution_backward(func, args)
        given = {storage_number(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if storage_number(tensor) not in given:
                self._count(tensor)
        return result

    def _convolution(self, func: Any, args: tuple[Any, ...]) -> Tensor:
        inputs, weight = args[:2]
        result: Tensor = func(*args)
        with self._temporary(_blocked(inputs, is_input=True)), self._temporary(_blocked(weight)):
            output = self._allocate(_blocked(result))
        self._count(result)
        self._release(output)
        return result

    def _convolution_backward(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Compute the gradient of the inputs first, then those of weight and bias."""
        outputs_gradient, inputs, weight = args[:3]
        results = func(*args)
        to_inputs, *others = results
        if to_inputs is not None:
            with self._temporary(_blocked(outputs_gradient)), self._temporary(_blocked(weight)):
                copy = self._allocate(_blocked(to_inputs))
            self._count(to_inputs)
            self._release(copy)
        of_inputs = _blocked(inputs, is_input=True)
        with self._temporary(_blocked(outputs_gradient)), self._temporary(of_inputs):
            copy = self._allocate(_blocked(weight))
        for tensor in others:
            if tensor is not None:
                self._count(tensor)
        self._release(copy)
        return results

    def _count(self, tensor: Tensor) -> None:
        key = storage_number(tensor)
        if key in self._storages:
            return
        storage = tensor.untyped_storage()
        self._storages[key] = self._allocate(storage.nbytes())
        weakref.finalize(storage, self._end_storage, key)

    def _end_storage(self, key: int) -> None:
        self._release(self._storages.pop(key))

    @contextmanager
    def _temporary(self, size: int) -> Iterator[None]:
        block = self._allocate(size)
        yield
        self._release(block)

    def _allocate(self, size: int) -> int:
        self._blocks += 1
        self._sizes[self._blocks] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        if size:
            self.events.append(HeapEvent(self._blocks, size))
        return self._blocks

    def _release(self, block: int) -> None:
        size = self._sizes.pop(block)
        self.now -= size
        if size:
            self.events.append(HeapEvent(block, None))


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (each for each in tree_iter(tree) if isinstance(each, Tensor))


def _blocked(tensor: Tensor, *, is_input: bool = False) -> int:
    """Return the bytes of a copy in blocked format; 0 for one that needs no copy.

    is_input: of a layer; the few channels of the first one need no blocks.
    """
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    samples, channels, *positions = tensor.shape
    if (channels_last and not tensor.is_contiguous()) or (is_input and channels < _FIRST_CHANNELS):
        return 0
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    padded = channels if channels < _FIRST_CHANNELS else -(-channels // block) * block
    return tensor.element_size() * samples * padded * torch.Size(positions).numel()
