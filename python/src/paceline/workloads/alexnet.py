"""AlexNet with one column (Krizhevsky: One weird trick for parallelizing convolutional neural
networks, arXiv:1404.5997), layer for layer as in torchvision, so that its weights load.
"""

from __future__ import annotations

from torch import nn

from paceline.training.dropout import SampleDropout
from paceline.training.model import Model


class AlexNet(Model):
    """61,100,840 parameters with 1000 classes; images from 63x63 pixels, made for 224x224."""

    def __init__(self, classes: int, *, dropout: bool) -> None:
        super().__init__(classes, dropout=dropout)
        self.features = nn.Sequential(
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
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = _classifier(256 * 6 * 6, 4096, classes, self.dropout)


class TinyAlexNet(Model):
    """The same kind of net with few channels, for tests; images from 32x32 pixels.

    A stride of 2 and kernels of 5 and 2 instead of 4, 11 and 3 leave something of small images.
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
        self.classifier = _classifier(32 * 2 * 2, 64, classes, self.dropout)


def _classifier(inputs: int, hidden: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        SampleDropout(dropout, layer=0),
        nn.Linear(inputs, hidden),
        nn.ReLU(inplace=True),
        SampleDropout(dropout, layer=1),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, classes),
    )
