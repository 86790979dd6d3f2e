"""Xception as DeepLabV3+ changes it (arXiv:1802.02611, figure 4): strides in place of pooling."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


def _separable(inputs: int, outputs: int, stride: int = 1, rate: int = 1) -> nn.Sequential:
    """Return a convolution of each channel and one of 1x1, both normalised."""
    depthwise = nn.Conv2d(
        inputs, inputs, 3, stride, padding=rate, dilation=rate, groups=inputs, bias=False
    )
    pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
    return nn.Sequential(
        depthwise, nn.BatchNorm2d(inputs), nn.ReLU(), pointwise, nn.BatchNorm2d(outputs), nn.ReLU()
    )


class _Block(nn.Module):
    """Three separable convolutions with a shortcut, then ReLU.

    Without it, the next normalisation would remove the biases of this block, and their gradients
    would be rounding errors.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        last = _separable(outputs, outputs, stride)[:-1]  # without ReLU: the shortcut is added
        scale = [m for m in last.modules() if isinstance(m, nn.BatchNorm2d)][-1].weight
        nn.init.zeros_(scale)  # as in ResNet: the block begins as its shortcut
        self.convolutions = nn.Sequential(
            _separable(inputs, outputs), _separable(outputs, outputs), last
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, units: Tensor) -> Tensor:
        return relu(self.convolutions(units) + self.shortcut(units))


def xception(width: int, middle_blocks: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the layers up to 1/4 of the images' side (2 * width channels), and those to 1/16
    (32 * width channels).

    width 64 and 16 middle blocks are Xception-65, as in the paper.
    """
    first, wide = width // 2, 728 * width // 64
    low = nn.Sequential(
        nn.Conv2d(3, first, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.Conv2d(first, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        _Block(width, 2 * width, stride=2),
    )
    high = nn.Sequential(
        _Block(2 * width, 4 * width, stride=2),
        _Block(4 * width, wide, stride=2),
        *(_Block(wide, wide) for _ in range(middle_blocks)),
        _Block(wide, 16 * width),
        _separable(16 * width, 24 * width, rate=2),
        _separable(24 * width, 24 * width, rate=2),
        _separable(24 * width, 32 * width, rate=2),
    )
    return low, high
