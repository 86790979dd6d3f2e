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
        self.classifier = linear_layers(256 * 6 * 6, 4096, classes, self.dropout)


def linear_layers(inputs: int, hidden: int, classes: int, dropout: float) -> nn.Sequential:
    """Return AlexNet's classifier; hidden: units of its inner layers."""
    return nn.Sequential(
        SampleDropout(dropout, layer=0),
        nn.Linear(inputs, hidden),
        nn.ReLU(inplace=True),
        SampleDropout(dropout, layer=1),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, classes),
    )
