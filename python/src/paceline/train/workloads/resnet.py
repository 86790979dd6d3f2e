"""Residual networks of bottleneck blocks (He et al., arXiv:1512.03385), with the names of
torchvision, so that its weights load.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from paceline.train.workloads.build import BuiltInOptions, BuiltInTask

EXPANSION = 4  # channels of a block's output over those of its inner convolutions
# Blocks of the four layers; 26 is for small machines and tests.
DEPTHS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class ResNetOptions(BuiltInOptions):
    """depth: convolutions and linear layers. width: channels after the first one."""

    depth: Literal[26, 50, 101, 152] = 101
    width: int = 64


class ResNet(BuiltInTask):
    """44,549,160 parameters with 1000 classes and depth 101; images from 32x32 pixels."""

    Options = ResNetOptions

    def model(self) -> nn.Module:
        width = self.options.width
        trunk = residual_layers(self.options.depth, width)
        return _Network(trunk, 8 * width * EXPANSION, self.settings.classes)


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 with a shortcut; the 3x3 has stride or dilation."""

    def __init__(self, inputs: int, width: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(
            width, width, 3, stride, padding=dilation, dilation=dilation, bias=False
        )
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        # The block begins as its shortcut (Goyal et al., arXiv:1706.02677). Otherwise a deep
        # network enlarges rounding errors, and first gradients of equivalent layouts differ.
        nn.init.zeros_(self.bn3.weight)
        self.relu = nn.ReLU()
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, images: Tensor) -> Tensor:
        units = self.relu(self.bn1(self.conv1(images)))
        units = self.relu(self.bn2(self.conv2(units)))
        joined: Tensor = self.relu(self.bn3(self.conv3(units)) + self.downsample(images))
        return joined


def residual_layers(depth: int, width: int, *, atrous: bool = False) -> dict[str, nn.Module]:
    """Return the layers by name, from the images to 8 * width * EXPANSION channels.

    The last feature maps have 1/32 of the images' side. atrous: 1/16, with dilation in layer4 after
    its first block, so that every second position has the value that it has without.
    """
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(width),
        "relu": nn.ReLU(),
        "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
    }
    inputs = width
    for number, blocks in enumerate(DEPTHS[depth]):
        inner = width * 2**number
        dilation = 2 if atrous and number == 3 else 1
        stride = 1 if number == 0 or dilation > 1 else 2
        first = Bottleneck(inputs, inner, stride)
        inputs = inner * EXPANSION
        others = (Bottleneck(inputs, inner, dilation=dilation) for _ in range(blocks - 1))
        layers[f"layer{number + 1}"] = nn.Sequential(first, *others)
    return layers


class _Network(nn.Module):
    """Classifier of images; pipelines split it between the residual blocks."""

    def __init__(self, trunk: dict[str, nn.Module], channels: int, classes: int) -> None:
        super().__init__()
        for name, layer in trunk.items():
            self.add_module(name, layer)
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.children():
            images = layer(images)
        return images


def convolution(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, rate: int = 1
) -> nn.Sequential:
    """Return a convolution that keeps the size with stride 1, normalised, and ReLU."""
    padding = rate * (kernel // 2)
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, rate, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return what a block adds to its output: its input, or that with the shape of the output."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    layer = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))
