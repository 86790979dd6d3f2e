"""Count the memory of tensors during a computation, real or with fake tensors."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Callable

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


_FIRST_CHANNELS = 5


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that operations have created meanwhile and that still exist.

    Convolutions also count the copies that oneDNN makes of their operands in its blocked format:
    channels in blocks of one vector register (oneDNN documentation, "Understanding memory
    formats"). Attributes: `now`, `peak`, and `peak_without_copies`, in bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.peak_without_copies = 0
        self._sizes: dict[int, int] = {}

    def reset_peak(self) -> None:
        self.peak = self.peak_without_copies = self.now

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        if func in _COPIES_OF:
            self.peak = max(self.peak, self.now + _COPIES_OF[func](args, result))
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001  (there is no public number)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        self.peak_without_copies = max(self.peak_without_copies, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _of_forward(args: tuple[Any, ...], result: Tensor) -> int:
    return _blocked(args[0]) + _blocked(args[1]) + _blocked(result)


def _of_backward(args: tuple[Any, ...], results: tuple[Tensor | None, ...]) -> int:
    """Return the copies of the larger half: gradient of the weight, or of the inputs."""
    outputs_gradient, inputs, weight = args[:3]
    to_inputs = results[0]
    larger = max(_blocked(inputs), 0 if to_inputs is None else _blocked(to_inputs))
    return _blocked(outputs_gradient) + _blocked(weight) + larger


_COPIES_OF: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    _FORWARD: _of_forward,
    _BACKWARD: _of_backward,
}


def _blocked(tensor: Tensor) -> int:
    """Return the bytes of a copy in blocked format; 0 for one that needs no copy.

    The first layer's few channels are not filled up to a block.
    """
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not tensor.is_contiguous():
        return 0
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    samples, channels, *positions = tensor.shape
    padded = channels if channels < _FIRST_CHANNELS else -(-channels // block) * block
    return tensor.element_size() * samples * padded * torch.Size(positions).numel()
