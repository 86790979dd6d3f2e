"""DeepLabV3+ (Chen et al., arXiv:1802.02611): atrous spatial pyramid pooling and a decoder, after a
residual network, a Swin transformer, or Xception, which it changes (figure 4): strides in place of
pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu

from paceline.base.errors import UsageError
from paceline.plan.trials.sample_order import SampleRandom
from paceline.train.data.masks import (
    ImagesWithMasks,
    Pair,
    SlicesWithMasks,
    class_of_value,
    volumes_in,
)
from paceline.train.training.task import NamedParameters, Sums
from paceline.train.workloads.build import BuiltInOptions, BuiltInTask
from paceline.train.workloads.resnet import EXPANSION, convolution, residual_layers, shortcut
from paceline.train.workloads.swin import map_sides, swin_layers

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


@dataclass(frozen=True)
class _Encoder:
    """low, high: paths of the layers, in order, before and after the maps that the decoder gets,
    too. channels, sides: of the maps after both. rates: of the atrous convolutions."""

    layers: dict[str, nn.Module]
    low: tuple[str, ...]
    high: tuple[str, ...]
    channels: tuple[int, int]
    sides: tuple[int, int]
    rates: tuple[int, ...]


def _convolutional(
    low: dict[str, nn.Module], high: dict[str, nn.Module], channels: tuple[int, int], side: int
) -> _Encoder:
    """Return an encoder whose maps have 1/4 and 1/16 of the images' side."""
    sides = (-(-side // 4), -(-side // _STRIDE))
    return _Encoder({**low, **high}, tuple(low), tuple(high), channels, sides, RATES)


def _encoder(options: DeepLabOptions, side: int) -> _Encoder:
    width = options.width
    if options.backbone == "xception":
        blocks = 16 if options.middle_blocks is None else options.middle_blocks
        low, high = xception(width, blocks)
        return _convolutional({"low": low}, {"high": high}, (2 * width, 32 * width), side)
    if options.backbone == "swin":
        blocks = 6 if options.middle_blocks is None else options.middle_blocks
        layers = swin_layers(width, blocks, options.stochastic_depth)
        paths = [f"features.{number}" for number, _ in enumerate(layers["features"].children())]
        channels, rates = (width, 8 * width), tuple(rate // 2 for rate in RATES)  # 1/32 of the side
        return _Encoder(
            layers, tuple(paths[:2]), (*paths[2:], "norm"), channels, map_sides(side), rates
        )
    named = list(residual_layers(options.depth, width, atrous=True).items())
    channels = (width * EXPANSION, 8 * width * EXPANSION)
    return _convolutional(dict(named[:5]), dict(named[5:]), channels, side)


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


class DeepLabOptions(BuiltInOptions):
    """folder: of images and masks, in place of synthetic ones. width: channels after the first
    layer, to which all others are proportional. ignore_index: value of the pixels that neither loss
    nor metrics count. mask_values: classes of the values in the masks of a folder."""

    backbone: Literal["resnet", "xception", "swin"] = "resnet"
    depth: Literal[26, 50, 101, 152] = 50  # of a ResNet
    # of an Xception (16), or of the third stage of a Swin transformer (6)
    middle_blocks: Annotated[int, Field(ge=0)] | None = None
    width: Annotated[int, Field(ge=2)] = 64
    stochastic_depth: Annotated[float, Field(ge=0, lt=1)] = 0.2  # of a Swin transformer
    optimizer: Literal["sgd", "adam"] = "sgd"
    augment: bool = True  # random scaling, cropping and mirroring
    flip_vertically: bool = False  # half of the images
    rotate_degrees: Annotated[float, Field(ge=0, le=180)] = 0.0  # at most, in both directions
    classes: int = CLASSES
    folder: str | None = None
    ignore_index: _MaskValue | None = None
    mask_values: dict[_MaskValue, _MaskValue] | None = None
    data_seed: int = 1  # of synthetic images

    @model_validator(mode="after")
    def _that_go_together(self) -> Self:
        if (self.flip_vertically or self.rotate_degrees) and not self.augment:
            raise ValueError("flip_vertically and rotate_degrees need augment = true")
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


class DeepLab(BuiltInTask):
    """Classify each pixel."""

    Options = DeepLabOptions
    input_field, target_field = "image", "mask"

    def dataset(self) -> MapStyleDataset:
        size = self.settings.image_size
        options = self.options
        if options.folder is not None:
            return self.held_out_dataset(options.folder)
        if options.classes < CLASSES:
            raise UsageError(f"classes: synthetic masks have {CLASSES}, got {options.classes}")
        return _Shapes(self.settings.samples, size, options.data_seed)

    def held_out_dataset(self, place: str) -> MapStyleDataset:
        options = self.options
        classes = class_of_value(options.classes, options.ignore_index, options.mask_values)
        kind = SlicesWithMasks if volumes_in(place) else ImagesWithMasks
        return kind(place, self.settings.image_size, classes)

    def model(self) -> nn.Module:
        return _Network(_encoder(self.options, self.settings.image_size), self)

    def augment(self, sample: NDArray[Any], random: SampleRandom) -> NDArray[Any]:
        options = self.options
        if not options.augment:
            return sample
        return moved(sample, random, flip=options.flip_vertically, degrees=options.rotate_degrees)

    def augment_target(self, target: NDArray[Any], random: SampleRandom) -> NDArray[Any]:
        return self.augment(target, random)

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


def moved(
    pixels: NDArray[Any], random: SampleRandom, *, flip: bool = False, degrees: float = 0.0
) -> NDArray[Any]:
    """Scale, crop and mirror an image or a mask; both get the nearest pixels of the same places.

    pixels: shape (side, side) or (side, side, channels). Places outside repeat the border.
    flip: turn half of the images upside down. degrees: rotate about the centre of what is seen, by
    at most that angle.
    """
    generator = random.numpy()
    side, scale = len(pixels), generator.uniform(*SCALES)
    starts = generator.random(2) * (side - side / scale)
    y, x = starts[:, None] + (np.arange(side) + 0.5) / scale
    if generator.random() < 0.5:
        x = x[::-1]
    if flip and generator.random() < 0.5:
        y = y[::-1]
    rows, columns = np.ix_(y, x)
    if degrees:
        angle = np.radians(generator.uniform(-degrees, degrees))
        down, right = rows - y.mean(), columns - x.mean()
        rows = y.mean() + np.cos(angle) * down - np.sin(angle) * right
        columns = x.mean() + np.sin(angle) * down + np.cos(angle) * right
    rows, columns = (np.clip(places, 0, side - 1).astype(np.int64) for places in (rows, columns))
    return pixels[rows, columns]


class _Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: convolutions of several rates, and the mean of the image."""

    def __init__(self, inputs: int, outputs: int, side: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        atrous = (convolution(inputs, outputs, rate=rate) for rate in rates)
        self.branches = nn.ModuleList([convolution(inputs, outputs, 1), *atrous])
        # Without normalisation: over one value per sample it would enlarge rounding errors.
        self.image = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, outputs, 1), nn.ReLU(), nn.Upsample(side)
        )
        self.project = convolution((len(rates) + 2) * outputs, outputs, 1)

    def forward(self, units: Tensor) -> Tensor:
        found = [branch(units) for branch in self.branches]
        joined: Tensor = self.project(torch.cat([*found, self.image(units)], 1))
        return joined


class _Network(nn.Module):
    """Encoder and decoder; pipelines split it before the low-level features and after their use.

    The layers of the encoder have their own names here, so that weights of others load.
    """

    def __init__(self, encoder: _Encoder, task: DeepLab) -> None:
        super().__init__()
        options, side = task.options, task.settings.image_size
        width = 4 * options.width
        # Corners of all maps of a convolutional encoder are then corners of the image.
        aligned = options.backbone != "swin" and side % _STRIDE == 1
        for name, layer in encoder.layers.items():
            self.add_module(name, layer)
        self._low, self._high = encoder.low, encoder.high
        low, high = encoder.channels
        self.pyramid = _Pyramid(high, width, encoder.sides[1], encoder.rates)
        self.enlarge = nn.Upsample(encoder.sides[0], mode="bilinear", align_corners=aligned)
        self.reduce = convolution(low, 3 * width // 16, 1)
        self.decoder = nn.Sequential(
            convolution(width + 3 * width // 16, width),
            convolution(width, width),
            nn.Conv2d(width, options.classes, 1),
            nn.Upsample(side, mode="bilinear", align_corners=aligned),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (samples, classes, side, side)."""
        low = self._through(self._low, images)
        encoded = self.enlarge(self.pyramid(self._through(self._high, low)))
        scores: Tensor = self.decoder(torch.cat([encoded, self.reduce(low)], 1))
        return scores

    def _through(self, paths: tuple[str, ...], units: Tensor) -> Tensor:
        for path in paths:
            units = self.get_submodule(path)(units)
        return units
