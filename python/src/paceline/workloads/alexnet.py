"""AlexNet with one column (Krizhevsky: One weird trick for parallelizing convolutional neural
networks, arXiv:1404.5997), layer for layer as in torchvision, so that its weights load.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import nn

from paceline.training.dropout import SampleDropout
from paceline.training.task import Task

if TYPE_CHECKING:
    from paceline.training.task import TaskSettings


class AlexNet(Task):
    """61,100,840 parameters with 1000 classes; images from 63x63 pixels, made for 224x224."""

    def model(self) -> nn.Module:
        features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        return alexnet(features, channels=256, pooled=6, hidden=4096, settings=self.settings)


class TinyAlexNet(Task):
    """AlexNet with few channels; images from 32x32 pixels.

    Strides of 2 instead of 4, and kernels of 5 and 2 instead of 11 and 3, suit small images.
    """

    def model(self) -> nn.Module:
        features = nn.Sequential(
            nn.Conv2d(3, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2, stride=2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2, stride=2),
            nn.Conv2d(32, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        return alexnet(features, channels=32, pooled=2, hidden=64, settings=self.settings)


def alexnet(
    features: nn.Sequential, *, channels: int, pooled: int, hidden: int, settings: TaskSettings
) -> nn.Sequential:
    """Return a network of this family: pooling and linear layers after `features`.

    channels: outputs of `features`. pooled: side of the pooled feature maps in pixels. hidden:
    units of inner linear layers.
    """
    dropout = 0.5 if settings.dropout else 0.0
    return nn.Sequential(
        OrderedDict(
            features=features,
            avgpool=nn.AdaptiveAvgPool2d((pooled, pooled)),
            flatten=nn.Flatten(1),
            classifier=nn.Sequential(
                SampleDropout(dropout, layer=0),
                nn.Linear(channels * pooled**2, hidden),
                nn.ReLU(inplace=True),
                SampleDropout(dropout, layer=1),
                nn.Linear(hidden, hidden),
                nn.ReLU(inplace=True),
                nn.Linear(hidden, settings.classes),
            ),
        )
    )
