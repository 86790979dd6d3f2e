"""Convolutional networks without branches: AlexNet, VGG16, and a small one.

AlexNet has one column (Krizhevsky: One weird trick for parallelizing convolutional neural networks,
arXiv:1404.5997). VGG16 is configuration D of Simonyan, Zisserman: Very Deep Convolutional Networks
for Large-Scale Image Recognition, arXiv:1409.1556. Both are layer for layer as in torchvision, so
that its weights load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import repeat

import torch
from torch import nn

from paceline.train.training.dropout import SampleDropout
from paceline.train.training.task import TaskSettings
from paceline.train.workloads.build import BuiltInTask

# A layer of `_features`: (output channels, kernel, stride, padding) of a convolution, or (kernel,
# stride) of a max pooling.
Layer = tuple[int, int, int, int] | tuple[int, int]
_ALEXNET: tuple[Layer, ...] = (
    (64, 11, 4, 2), (3, 2), (192, 5, 1, 2), (3, 2),
    (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1), (3, 2),
)  # fmt: skip
# Strides of 2 instead of 4, and kernels of 5 and 2 instead of 11 and 3, suit small images.
_TINY_ALEXNET: tuple[Layer, ...] = (
    (16, 5, 2, 2), (2, 2), (32, 3, 1, 1), (2, 2), (32, 3, 1, 1), (2, 2),
)  # fmt: skip
_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions


class AlexNet(BuiltInTask):
    """61,100,840 parameters with 1000 classes; images from 63x63 pixels, made for 224x224."""

    def model(self) -> nn.Module:
        return _alexnet(_ALEXNET, inputs=256, pooled=6, hidden=4096, settings=self.settings)


class TinyAlexNet(BuiltInTask):
    """AlexNet with few channels; images from 32x32 pixels."""

    def model(self) -> nn.Module:
        return _alexnet(_TINY_ALEXNET, inputs=32, pooled=2, hidden=64, settings=self.settings)


class VGG16(BuiltInTask):
    """138,357,544 parameters with 1000 classes; images from 32x32 pixels, made for 224x224."""

    def model(self) -> nn.Module:
        return vgg(_VGG16, 7, 4096, self.settings.classes, dropout=self.settings.dropout)


class CifarCnn(BuiltInTask):
    """For images of 32x32 or 64x64 pixels: three pairs of convolutions, each with twice the
    channels on half the side, as in VGG."""

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        inputs = 3
        for channels in (32, 64, 128):
            for _ in range(2):
                convolution = nn.Conv2d(inputs, channels, 3, padding=1)
                # He et al., arXiv:1502.01852; with torch's default the first epochs learn nothing
                nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
                layers += [convolution, nn.ReLU(inplace=True)]
                inputs = channels
            layers.append(nn.MaxPool2d(2))
        return _network(
            nn.Sequential(*layers),
            4,
            nn.Linear(inputs * 4 * 4, 128),
            nn.ReLU(inplace=True),
            nn.Linear(128, self.settings.classes),
        )


def vgg(
    stages: Iterable[tuple[int, int]], pooled: int, hidden: int, classes: int, *, dropout: bool
) -> nn.Sequential:
    """Return a network of the VGG family with initial weights.

    stages: (channels, number) of the 3x3 convolutions before each 2x2 max pooling. pooled: side of
    the last feature maps in pixels. hidden: units of linear layers.
    """
    layers: list[Layer] = []
    for channels, number in stages:
        layers += [*repeat((channels, 3, 1, 1), number), (2, 2)]
    p = 0.5 if dropout else 0.0
    device = torch.get_default_device()
    with torch.device("meta"):  # the weights that the layers themselves would draw are not used
        model = _network(
            _features(layers),
            pooled,
            nn.Linear(channels * pooled**2, hidden),
            nn.ReLU(inplace=True),
            SampleDropout(p, layer=0),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            SampleDropout(p, layer=1),
            nn.Linear(hidden, classes),
        )
    model.to_empty(device=device)
    # As torchvision: He's normal for convolutions (fan out), normal 0.01 for others.
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
        else:
            continue
        assert module.bias is not None
        nn.init.zeros_(module.bias)
    return model


def _alexnet(
    features: Iterable[Layer], *, inputs: int, pooled: int, hidden: int, settings: TaskSettings
) -> nn.Sequential:
    """Return a network of the AlexNet family. inputs: channels of the pooled feature maps, whose
    side is `pooled`. hidden: units of inner linear layers."""
    p = 0.5 if settings.dropout else 0.0
    return _network(
        _features(features),
        pooled,
        SampleDropout(p, layer=0),
        nn.Linear(inputs * pooled**2, hidden),
        nn.ReLU(inplace=True),
        SampleDropout(p, layer=1),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, settings.classes),
    )


def _network(features: nn.Module, pooled: int, *classifier: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            features=features,
            avgpool=nn.AdaptiveAvgPool2d((pooled, pooled)),
            flatten=nn.Flatten(1),
            classifier=nn.Sequential(*classifier),
        )
    )


def _features(layers: Iterable[Layer]) -> nn.Sequential:
    found: list[nn.Module] = []
    inputs = 3
    for layer in layers:
        if len(layer) == 2:
            found.append(nn.MaxPool2d(*layer))
            continue
        outputs, kernel, stride, padding = layer
        found += [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]
        inputs = outputs
    return nn.Sequential(*found)
