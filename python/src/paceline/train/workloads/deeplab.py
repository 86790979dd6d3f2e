"""DeepLabV3+ (Chen et al., arXiv:1802.02611): atrous spatial pyramid pooling and a decoder, after a
residual network or Xception, which it changes (figure 4): strides in place of pooling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu

from paceline.base.errors import UsageError
from paceline.plan.trials.sample_order import SampleRandom
from paceline.train.data.masks import ImagesWithMasks, Pair, class_of_value
from paceline.train.training.task import NamedParameters, Sums, Task, TaskOptions
from paceline.train.workloads.resnet import EXPANSION, convolution, residual_layers, shortcut

if TYPE_CHECKING:
    from paceline.train.data.items import MapStyleDataset


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
        self.shortcut = shortcut(inputs, outputs, stride)

    def forward(self, units: Tensor) -> Tensor:
        return relu(self.convolutions(units) + self.shortcut(units))


def xception(width: int, middle_blocks: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the layers up to 1/4 of the images' side (2 * width channels), and those to 1/16
    (32 * width channels).

    width 64 and 16 middle blocks are Xception-65, as in the paper.
    """
    first, wide = width // 2, 728 * width // 64
    low = nn.Sequential(
        *convolution(3, first, stride=2),
        *convolution(first, width),
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


RATES = (6, 12, 18)  # of the atrous convolutions, for 1/16 of the images' side
SCALES = (0.75, 1.5)  # range of the random scaling
CLASSES = 4  # background and three shapes
_COLOURS = np.array([(90, 90, 90), (200, 80, 60), (60, 180, 80), (70, 90, 210)], dtype=np.float64)
_NOISE = 40.0  # standard deviation of a pixel: colours overlap, so shapes matter too
_STRIDE = 16  # of the feature maps that the pyramid gets
_MaskValue = Annotated[int, Field(ge=0, le=255)]


class DeepLabOptions(TaskOptions):
    """folder: of images and masks, in place of synthetic ones. width: channels after the first
    layer of a ResNet, to which all others are proportional. ignore_index: value of the pixels that
    neither loss nor metrics count. mask_values: classes of the values in the masks of a folder."""

    backbone: Literal["resnet", "xception"] = "resnet"
    depth: Literal[26, 50, 101, 152] = 50  # of a ResNet
    middle_blocks: int = 16  # of an Xception
    width: int = 64
    optimizer: Literal["sgd", "adam"] = "sgd"
    augment: bool = True
    classes: int = CLASSES
    folder: str | None = None
    ignore_index: _MaskValue | None = None
    mask_values: dict[_MaskValue, _MaskValue] | None = None
    data_seed: int = 1  # of synthetic images

    @model_validator(mode="after")
    def _values_of_masks(self) -> Self:
        if self.mask_values is None:
            return self
        if self.folder is None:
            raise ValueError("mask_values needs the option folder, whose masks have these values")
        for value in self.mask_values.values():
            if value >= self.classes and value != self.ignore_index:
                raise ValueError(
                    f"mask_values: expected classes from 0 to {self.classes - 1}, or ignore_index, "
                    f"got {value}"
                )
        return self


class DeepLab(Task):
    """Classify each pixel."""

    Options = DeepLabOptions
    input_field, target_field = "image", "mask"

    def dataset(self) -> MapStyleDataset:
        size = self.settings.image_size
        options = self.options
        if options.folder is not None:
            classes = class_of_value(options.classes, options.ignore_index, options.mask_values)
            return ImagesWithMasks(options.folder, size, classes)
        if options.classes < CLASSES:
            raise UsageError(f"classes: synthetic masks have {CLASSES}, got {options.classes}")
        return _Shapes(self.settings.samples, size, options.data_seed)

    def model(self) -> nn.Module:
        options = self.options
        if options.backbone == "xception":
            low, high = xception(options.width, options.middle_blocks)
            channels = (2 * options.width, 32 * options.width)
        else:
            layers = list(residual_layers(options.depth, options.width, atrous=True).values())
            low, high = nn.Sequential(*layers[:5]), nn.Sequential(*layers[5:])
            channels = (options.width * EXPANSION, 8 * options.width * EXPANSION)
        return _Network(low, high, channels, self.settings.image_size, options)

    def augment(self, sample: NDArray[Any], random: SampleRandom) -> NDArray[Any]:
        return scaled_crop(sample, random) if self.options.augment else sample

    def augment_target(self, target: NDArray[Any], random: SampleRandom) -> NDArray[Any]:
        return scaled_crop(target, random) if self.options.augment else target

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return cross entropy plus Dice loss of each sample, over its pixels that count.

        Means are over a sample, not over a batch, so that a batch can be divided.
        """
        scores, counted = outputs.float(), self._counted(targets)
        classes = targets * counted
        entropy = (cross_entropy(scores, classes, reduction="none") * counted).sum((1, 2))
        share = scores.softmax(1) * counted[:, None]
        actual = one_hot(classes, self.options.classes).permute(0, 3, 1, 2) * counted[:, None]
        common = 2 * (share * actual).sum((2, 3)) + 1
        dice = common / (share.sum((2, 3)) + actual.sum((2, 3)) + 1)
        return entropy / counted.sum((1, 2)).clamp_min(1) + 1 - dice.mean(1)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor | Sums]:
        """Return the loss, and mean intersection over union and Dice over the classes."""
        classes = torch.arange(self.options.classes, device=outputs.device).view(-1, 1, 1, 1)
        counted = self._counted(targets)
        predicted, actual = (outputs.argmax(1) == classes) & counted, (targets == classes) & counted
        pixels = (1, 2, 3)
        both = (predicted & actual).sum(pixels)
        return {
            "loss": self.loss(outputs, targets),
            "mean_iou": (both, (predicted | actual).sum(pixels)),
            "dice": (2 * both, predicted.sum(pixels) + actual.sum(pixels)),
        }

    def _counted(self, targets: Tensor) -> Tensor:
        """Return the pixels that loss and metrics count."""
        ignored = self.options.ignore_index
        return torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored

    def optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        if self.options.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.settings.learning_rate)
        return super().optimizer(parameters)


class _Shapes:
    """Synthetic images with masks: discs, squares and triangles on a noisy background.

    A map-style data set; sample `index` depends on (seed, index, size) alone."""

    def __init__(self, samples: int, size: int, seed: int) -> None:
        self._samples, self._size, self._seed = samples, size, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Pair:
        """Return pixels (size, size, 3) and classes (size, size), both uint8."""
        rng = np.random.default_rng([self._seed, index])
        size = self._size
        rows, columns = np.mgrid[:size, :size]
        mask = np.zeros((size, size), dtype=np.uint8)
        for kind in rng.permutation([1, 2, 3, *rng.integers(1, CLASSES, 2)]):
            radius = rng.uniform(0.12, 0.28) * size
            y, x = rng.uniform(0.15, 0.85, 2) * size
            mask[_inside(int(kind), rows - y, columns - x, radius)] = kind
        noise = rng.normal(0, _NOISE, (size, size, 3))
        return np.clip(_COLOURS[mask] + noise, 0, 255).astype(np.uint8), mask


def _inside(
    kind: int, y: NDArray[np.float64], x: NDArray[np.float64], radius: float
) -> NDArray[np.bool_]:
    """Return which pixels a shape covers; y and x are relative to its centre."""
    covered: NDArray[np.bool_]
    if kind == 1:
        covered = y**2 + x**2 <= radius**2
    elif kind == 2:
        covered = np.maximum(np.abs(y), np.abs(x)) <= radius
    else:
        covered = (y <= radius) & (2 * np.abs(x) <= y + radius)
    return covered


def scaled_crop(pixels: NDArray[Any], random: SampleRandom) -> NDArray[Any]:
    """Scale, crop and mirror an image or a mask; both get the nearest pixels of the same places.

    pixels: shape (side, side) or (side, side, channels). Places outside repeat the border.
    """
    generator = random.numpy()
    side, scale = len(pixels), generator.uniform(*SCALES)
    starts = generator.random(2) * (side - side / scale)
    places = starts[:, None] + (np.arange(side) + 0.5) / scale
    rows, columns = np.clip(places, 0, side - 1).astype(np.int64)
    if generator.random() < 0.5:
        columns = columns[::-1]
    return pixels[np.ix_(rows, columns)]


class _Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: convolutions of several rates, and the mean of the image."""

    def __init__(self, inputs: int, outputs: int, side: int) -> None:
        super().__init__()
        atrous = (convolution(inputs, outputs, rate=rate) for rate in RATES)
        self.branches = nn.ModuleList([convolution(inputs, outputs, 1), *atrous])
        # Without normalisation: over one value per sample it would enlarge rounding errors.
        self.image = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, outputs, 1), nn.ReLU(), nn.Upsample(side)
        )
        self.project = convolution((len(RATES) + 2) * outputs, outputs, 1)

    def forward(self, units: Tensor) -> Tensor:
        found = [branch(units) for branch in self.branches]
        joined: Tensor = self.project(torch.cat([*found, self.image(units)], 1))
        return joined


class _Network(nn.Module):
    """Encoder and decoder; pipelines split it before the low-level features and after their use."""

    def __init__(
        self,
        low: nn.Module,
        high: nn.Module,
        channels: tuple[int, int],
        side: int,
        options: DeepLabOptions,
    ) -> None:
        super().__init__()
        width = 4 * options.width
        aligned = side % _STRIDE == 1  # then the corners of all maps are corners of the image
        self.low, self.high = low, high
        self.pyramid = _Pyramid(channels[1], width, -(-side // _STRIDE))
        self.enlarge = nn.Upsample(-(-side // 4), mode="bilinear", align_corners=aligned)
        self.reduce = convolution(channels[0], 3 * width // 16, 1)
        self.decoder = nn.Sequential(
            convolution(width + 3 * width // 16, width),
            convolution(width, width),
            nn.Conv2d(width, options.classes, 1),
            nn.Upsample(side, mode="bilinear", align_corners=aligned),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (samples, classes, side, side)."""
        low = self.low(images)
        encoded = self.enlarge(self.pyramid(self.high(low)))
        scores: Tensor = self.decoder(torch.cat([encoded, self.reduce(low)], 1))
        return scores
