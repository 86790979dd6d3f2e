"""A small AlexNet, for tests and the quickstart."""

from __future__ import annotations

from torch import nn

from paceline.training.task import Task
from paceline.workloads.simple_big.task import alexnet


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
