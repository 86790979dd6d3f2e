"""Convert images to model inputs: uint8 rows of pixels to normalised float32 tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.plan.spec.values import MemoryFormat

# Means and standard deviations of ImageNet's RGB channels, as torchvision's weights expect them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def torch_memory_format(name: MemoryFormat) -> torch.memory_format:
    return _FORMATS[name]


def put_in_memory_format(model: nn.Module, name: MemoryFormat) -> None:
    """Convert the weights of the model's convolutions to that memory format."""
    model.to(memory_format=_FORMATS[name])  # type: ignore[call-overload]  # torch's stub lacks it


def empty_input(images: NDArray[np.uint8], memory_format: MemoryFormat) -> Tensor:
    """Allocate the result of `to_input` for these images."""
    samples, height, width, channels = images.shape
    shape = (samples, channels, height, width)
    return torch.empty(shape, memory_format=_FORMATS[memory_format])


def to_input(
    images: NDArray[np.uint8], memory_format: MemoryFormat, out: Tensor | None = None
) -> Tensor:
    """Return (images / 255 - MEAN) / STD as float32.

    images: shape (n, height, width, 3), RGB. Returns shape (n, 3, height, width) in
    `memory_format`; for channels_last the order of the bytes stays the same. out: a tensor of that
    shape to fill and return.
    """
    scaled = empty_input(images, memory_format) if out is None else out
    scaled.copy_(torch.from_numpy(images).permute(0, 3, 1, 2))
    scale, offset = _channel_constants()
    return torch.addcmul(offset, scaled, scale, out=scaled)


def _channel_constants() -> tuple[Tensor, Tensor]:
    """Return scale and offset per channel, shape (1, 3, 1, 1): one multiply-add per pixel."""
    std = torch.tensor(STD, dtype=torch.float64)
    mean = torch.tensor(MEAN, dtype=torch.float64)
    scale, offset = 1 / (255 * std), -mean / std
    return scale.float().view(1, 3, 1, 1), offset.float().view(1, 3, 1, 1)
