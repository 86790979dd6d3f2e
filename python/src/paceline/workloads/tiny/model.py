"""A small AlexNet, for tests and the quickstart."""

from __future__ import annotations

from torch import nn

from paceline.training.model import Model
from paceline.workloads.simple_big.model import linear_layers


class TinyAlexNet(Model):
    """AlexNet with few channels; images from 32x32 pixels.

    Strides of 2 instead of 4, and kernels of 5 and 2 instead of 11 and 3, suit small images.
    """

    def __init__(self, classes: int, *, dropout: bool) -> None:
        super().__init__(classes, dropout=dropout)
        self.features = nn.Sequential(
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
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = linear_layers(32 * 2 * 2, 64, classes, self.dropout)
