"""A network in the shape of EAST (Zhou et al., arXiv:1704.03155).

A second path merges the outputs of four stages in reverse order. While they wait, the model cannot
be split.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from paceline.base.errors import UsageError
from paceline.plan.trials.sample_order import SampleRandom
from paceline.train.data.text_boxes import (
    BoxSample,
    ImagesWithText,
    Rectangle,
    add_box,
    empty_target,
)
from paceline.train.training.task import NamedParameters, Sums
from paceline.train.workloads.build import BuiltInOptions, BuiltInTask
from paceline.train.workloads.resnet import convolution

if TYPE_CHECKING:
    from paceline.train.data.items import MapStyleDataset

_STRIDE = 32  # pixels of the smallest feature map's cells
_MOST = math.pi / 4  # angles that the network can state, in both directions
_SYNTHETIC = math.radians(20)  # the largest angle of a synthetic box
_ANGLE_WEIGHT = 10  # of the loss of the angle, as published


class EastOptions(BuiltInOptions):
    """width: channels of the first stage; 64 is that of the paper's PVANet. angle: boxes may be
    rotated, and the network has a map of their angles. folder: of images and text files, in place
    of synthetic ones."""

    width: int = 16
    angle: bool = False
    folder: str | None = None
    data_seed: int = 1


class Boxes:
    """Synthetic images: striped rectangles, as lines of text, on noise."""

    def __init__(self, samples: int, size: int, seed: int, *, with_angle: bool = False) -> None:
        self._samples, self._size, self._seed = samples, size, seed
        self._with_angle = with_angle

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> BoxSample:
        rng = np.random.default_rng([self._seed, index])
        size = self._size
        image = rng.normal(110, 25, (size, size, 3))
        target = empty_target(size, with_angle=self._with_angle)
        centres = np.arange(size) + 0.5
        y, x = np.meshgrid(centres, centres, indexing="ij")
        for half in (0, 1):  # one box in each half: upright boxes do not overlap
            height, width = rng.integers(size // 8, size // 3), rng.integers(size // 3, size // 2)
            top = half * size // 2 + rng.integers(0, size // 2 - height)
            left = rng.integers(0, size - width)
            angle = rng.uniform(-_SYNTHETIC, _SYNTHETIC) if self._with_angle else 0.0
            box = Rectangle(left + width / 2, top + height / 2, width, height, angle)
            inside = (box.edges(x, y) > 0).all(0)
            along, _ = box.places(x, y)
            image[inside] += (90.0 * (along[inside] // 3 % 2) - 70)[:, None]
            add_box(target, box)
        return np.clip(image, 0, 255).astype(np.uint8), target


class East(BuiltInTask):
    """Find boxes of text. Images have a side that is a multiple of 32 pixels."""

    Options = EastOptions
    input_field, target_field = "image", "boxes"

    def dataset(self) -> MapStyleDataset:
        options, size = self.options, self.settings.image_size
        if options.folder is not None:
            return self.held_out_dataset(options.folder)
        return Boxes(self.settings.samples, size, options.data_seed, with_angle=options.angle)

    def held_out_dataset(self, place: str) -> MapStyleDataset:
        angle = self.options.angle
        return ImagesWithText(place, self.settings.image_size, with_angle=angle)

    def model(self) -> nn.Module:
        if self.settings.image_size % _STRIDE:
            side = self.settings.image_size
            raise UsageError(f"image_size: east needs a multiple of {_STRIDE}, got {side}")
        return _Network(self.options.width, with_angle=self.options.angle)

    def augment(self, sample: NDArray[Any], random: SampleRandom) -> NDArray[Any]:  # noqa: ARG002
        """Return the image unchanged: a mirrored one would need other distances."""
        return sample

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return balanced cross entropy of the text plus -log IoU of the boxes, of each sample, and
        the loss of their angles.

        Cells whose text is not known do not count.
        """
        counted = targets[:, 0] >= 0
        score, text = outputs[:, 0], targets[:, 0] * counted
        share = text.sum((1, 2), keepdim=True) / counted.sum((1, 2), keepdim=True).clamp_min(1)
        weight = (text * (1 - share) + (1 - text) * share) * counted
        entropy = binary_cross_entropy_with_logits(score, text, reduction="none")
        balanced = (weight * entropy).sum((1, 2)) / weight.sum((1, 2)).clamp_min(1)
        misplaced = -torch.log(_overlap(outputs, targets))
        if self.options.angle:
            misplaced = misplaced + _ANGLE_WEIGHT * (1 - torch.cos(_turned(outputs, targets)))
        return 2 * balanced + (text * misplaced).sum((1, 2)) / text.sum((1, 2)).clamp_min(1)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor | Sums]:
        """Return the loss, the IoU of text cells, and of their boxes the mean IoU, in the
        direction of the box, and the mean error of the angle in degrees."""
        counted = targets[:, 0] >= 0
        predicted, text = (outputs[:, 0] > 0) & counted, targets[:, 0] > 0
        boxes = (_overlap(outputs, targets) * text).sum()
        found: dict[str, Tensor | Sums] = {
            "loss": self.loss(outputs, targets),
            "text_iou": ((predicted & text).sum(), (predicted | text).sum()),
            "box_iou": (boxes, text.sum()),
        }
        if self.options.angle:
            error = torch.rad2deg(_turned(outputs, targets).abs())
            found["angle_error"] = ((error * text).sum(), text.sum())
        return found

    def optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.settings.learning_rate)


def _overlap(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return intersection over union of predicted and actual boxes around each cell.

    Both are in (0, 1]: one is added to both areas, in cells, so that the logarithm is finite.
    """
    found, actual = outputs[:, 1:5].float().sigmoid(), targets[:, 1:5]
    unit = (1 / outputs.shape[-1]) ** 2
    least = torch.minimum(found, actual)
    common = (least[:, 0] + least[:, 2]) * (least[:, 1] + least[:, 3])
    areas = [(box[:, 0] + box[:, 2]) * (box[:, 1] + box[:, 3]) for box in (found, actual)]
    return (common + unit) / (areas[0] + areas[1] - common + unit)


def _turned(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return predicted less actual angles of each cell, in radians."""
    return _MOST * (2 * outputs[:, 5].float().sigmoid() - 1) - targets[:, 5]


class _Network(nn.Module):
    """Stages with 1/4, 1/8, 1/16 and 1/32 of the side, and the path that merges them."""

    def __init__(self, width: int, *, with_angle: bool) -> None:
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
        self.angle = nn.Conv2d(width // 2, 1, 1) if with_angle else None

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of text, logits of distances to four edges, and those of angles, if it has
        them: (samples, 5 or 6, h/4, w/4)."""
        units = self.stem(images)
        found = []
        for stage in self.stages:
            units = stage(units)
            found.append(units)
        for merge, skip in zip(self.merges, found[2::-1], strict=True):
            units = merge(torch.cat([self.enlarge(units), skip], 1))
        units = self.last(units)
        maps = (
            (self.score, self.edges) if self.angle is None else (self.score, self.edges, self.angle)
        )
        return torch.cat([layer(units) for layer in maps], 1)
