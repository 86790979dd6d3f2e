"""VGG16 (Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition,
arXiv:1409.1556, configuration D), layer for layer as in torchvision, so that its weights load.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from paceline.training.dropout import SampleDropout
from paceline.training.task import Task

_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


class VGG16(Task):
    """138,357,544 parameters with 1000 classes; images from 32x32 pixels, made for 224x224."""

    def model(self) -> nn.Module:
        return vgg(_VGG16, 7, 4096, self.settings.classes, dropout=self.settings.dropout)


def vgg(
    channels: tuple[int, ...], pooled: int, hidden: int, classes: int, *, dropout: bool
) -> nn.Sequential:
    """Return a network of this family with initial weights.

    channels: output channels of the 3x3 convolutions; 0 is a 2x2 max pooling. pooled: side of the
    last feature maps in pixels. hidden: units of linear layers.
    """
    inputs = [c for c in channels if c][-1] * pooled**2
    p = 0.5 if dropout else 0.0
    device = torch.get_default_device()
    with torch.device("meta"):  # the weights that the layers themselves would draw are not used
        model = nn.Sequential(
            OrderedDict(
                features=nn.Sequential(*_convolutions(channels)),
                avgpool=nn.AdaptiveAvgPool2d((pooled, pooled)),
                flatten=nn.Flatten(1),
                classifier=nn.Sequential(
                    nn.Linear(inputs, hidden),
                    nn.ReLU(inplace=True),
                    SampleDropout(p, layer=0),
                    nn.Linear(hidden, hidden),
                    nn.ReLU(inplace=True),
                    SampleDropout(p, layer=1),
                    nn.Linear(hidden, classes),
                ),
            )
        )
    model.to_empty(device=device)
    _draw_weights(model)
    return model


def _draw_weights(model: nn.Module) -> None:
    """Draw as torchvision: He's normal for convolutions (fan out), normal 0.01 for others."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
        else:
            continue
        assert module.bias is not None
        nn.init.zeros_(module.bias)


def _convolutions(channels: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in channels:
        if outputs == 0:
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
            continue
        layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
        inputs = outputs
    return layers
