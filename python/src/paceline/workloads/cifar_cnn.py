"""A small convolutional network for images of 32x32 or 64x64 pixels."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from paceline.training.task import Task


class CifarCnn(Task):
    """Three pairs of convolutions, each with twice the channels on half the side, as in VGG."""

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
        return nn.Sequential(
            OrderedDict(
                features=nn.Sequential(*layers),
                avgpool=nn.AdaptiveAvgPool2d(4),
                flatten=nn.Flatten(1),
                classifier=nn.Sequential(
                    nn.Linear(inputs * 4 * 4, 128),
                    nn.ReLU(inplace=True),
                    nn.Linear(128, self.settings.classes),
                ),
            )
        )
