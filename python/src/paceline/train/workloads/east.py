"""A network in the shape of EAST (Zhou et al., arXiv:1704.03155).

A second path merges the outputs of four stages in reverse order. While they wait, the model cannot
be split.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from paceline.base.errors import UsageError
from paceline.plan.trials.sample_order import SampleRandom
from paceline.train.training.task import NamedParameters, Sums
from paceline.train.workloads.built_in import BuiltInOptions, BuiltInTask
from paceline.train.workloads.resnet import convolution

_STRIDE, _CELL = 32, 4  # pixels of the smallest feature map's cells, and of the outputs' cells


class EastOptions(BuiltInOptions):
    """width: channels of the first stage; 64 is that of the paper's PVANet."""

    width: int = 16
    data_seed: int = 1


class Boxes:
    """Synthetic images: striped rectangles, as lines of text, on noise.

    Targets have the shape (5, size / 4, size / 4): whether a cell is text, and the distances from
    its centre to the four edges of the box, in image sizes.
    """

    def __init__(self, samples: int, size: int, seed: int) -> None:
        self._samples, self._size, self._seed = samples, size, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        rng = np.random.default_rng([self._seed, index])
        size = self._size
        image = rng.normal(110, 25, (size, size, 3))
        target = np.zeros((5, size // _CELL, size // _CELL), dtype=np.float32)
        centres = (np.arange(size // _CELL) + 0.5) * _CELL
        y, x = np.meshgrid(centres, centres, indexing="ij")
        for half in (0, 1):  # one box in each half: boxes do not overlap
            height, width = rng.integers(size // 8, size // 3), rng.integers(size // 3, size // 2)
            top = half * size // 2 + rng.integers(0, size // 2 - height)
            left = rng.integers(0, size - width)
            stripes = 90.0 * (np.arange(width) // 3 % 2) - 70
            image[top : top + height, left : left + width] += stripes[None, :, None]
            edges = np.stack([y - top, left + width - x, top + height - y, x - left])
            inside = (edges > 0).all(0)
            target[0][inside] = 1
            target[1:, inside] = edges[:, inside] / size
        return np.clip(image, 0, 255).astype(np.uint8), target


class East(BuiltInTask):
    """Find boxes of text. Images have a side that is a multiple of 32 pixels."""

    Options = EastOptions
    input_field, target_field = "image", "boxes"

    def dataset(self) -> Boxes:
        return Boxes(self.settings.samples, self.settings.image_size, self.options.data_seed)

    def model(self) -> nn.Module:
        if self.settings.image_size % _STRIDE:
            side = self.settings.image_size
            raise UsageError(f"image_size: east needs a multiple of {_STRIDE}, got {side}")
        return _Network(self.options.width)

    def augment(self, sample: NDArray[Any], random: SampleRandom) -> NDArray[Any]:  # noqa: ARG002
        """Return the image unchanged: a mirrored one would need other distances."""
        return sample

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return balanced cross entropy of the text plus -log IoU of the boxes, of each sample."""
        score, text = outputs[:, 0], targets[:, 0]
        share = text.mean((1, 2), keepdim=True)
        weight = text * (1 - share) + (1 - text) * share
        entropy = binary_cross_entropy_with_logits(score, text, reduction="none")
        balanced = (weight * entropy).sum((1, 2)) / weight.sum((1, 2)).clamp_min(1)
        misplaced = -torch.log(_overlap(outputs, targets))
        return 2 * balanced + (text * misplaced).sum((1, 2)) / text.sum((1, 2)).clamp_min(1)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor | Sums]:
        """Return the loss, the IoU of text cells, and the mean IoU of their boxes."""
        predicted, text = outputs[:, 0] > 0, targets[:, 0] > 0
        boxes = (_overlap(outputs, targets) * text).sum()
        return {
            "loss": self.loss(outputs, targets),
            "text_iou": ((predicted & text).sum(), (predicted | text).sum()),
            "box_iou": (boxes, text.sum()),
        }

    def optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.settings.learning_rate)


def _overlap(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return intersection over union of predicted and actual boxes around each cell.

    Both are in (0, 1]: one is added to both areas, in cells, so that the logarithm is finite.
    """
    found, actual = outputs[:, 1:].float().sigmoid(), targets[:, 1:]
    unit = (1 / outputs.shape[-1]) ** 2
    least = torch.minimum(found, actual)
    common = (least[:, 0] + least[:, 2]) * (least[:, 1] + least[:, 3])
    areas = [(box[:, 0] + box[:, 2]) * (box[:, 1] + box[:, 3]) for box in (found, actual)]
    return (common + unit) / (areas[0] + areas[1] - common + unit)


class _Network(nn.Module):
    """Stages with 1/4, 1/8, 1/16 and 1/32 of the side, and the path that merges them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = convolution(3, width // 4, 7, 2)
        channels = (width, 2 * width, 4 * width, 6 * width)
        before = (width // 4, *channels[:-1])
        self.stages = nn.ModuleList(
            nn.Sequential(convolution(i, o, 3, 2), convolution(o, o))
            for i, o in zip(before, channels, strict=True)
        )
        merged = (2 * width, width, width // 2)  # from the smallest to the largest map
        entering = (channels[3], *merged[:-1])
        self.merges = nn.ModuleList(
            nn.Sequential(convolution(i + skip, o, 1), convolution(o, o))
            for i, skip, o in zip(entering, channels[2::-1], merged, strict=True)
        )
        self.enlarge = nn.Upsample(scale_factor=2, mode="bilinear")
        self.last = convolution(merged[-1], width // 2)
        self.score, self.edges = nn.Conv2d(width // 2, 1, 1), nn.Conv2d(width // 2, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of text, and logits of distances to four edges: (samples, 5, h/4, w/4)."""
        units = self.stem(images)
        found = []
        for stage in self.stages:
            units = stage(units)
            found.append(units)
        for merge, skip in zip(self.merges, found[2::-1], strict=True):
            units = merge(torch.cat([self.enlarge(units), skip], 1))
        units = self.last(units)
        return torch.cat([self.score(units), self.edges(units)], 1)
