"""VGG16 (Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition,
arXiv:1409.1556, configuration D), layer for layer as in torchvision, so that its weights load.
"""

from __future__ import annotations

from torch import nn

from paceline.training.dropout import SampleDropout
from paceline.training.model import Model

# Output channels of the 3x3 convolutions; 0 is a 2x2 max pooling.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
_TINY = (8, 8, 0, 16, 16, 0, 16, 16, 0)


class _VGG(Model):
    """Common parts of VGG networks."""

    def draw_weights(self) -> None:
        """Draw weights as torchvision does: He's normal for convolutions, else N(0, 0.01)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            else:
                continue
            assert module.bias is not None
            nn.init.zeros_(module.bias)


class VGG16(_VGG):
    """138,357,544 parameters with 1000 classes; images from 32x32 pixels, made for 224x224."""

    def __init__(self, classes: int, *, dropout: bool) -> None:
        super().__init__(classes, dropout=dropout)
        self.features = nn.Sequential(*_convolutions(_VGG16))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = _classifier(512 * 7 * 7, 4096, classes, self.dropout)


class TinyVGG(_VGG):
    """The same kind of net with three blocks and few channels, for tests; from 32x32 pixels."""

    def __init__(self, classes: int, *, dropout: bool) -> None:
        super().__init__(classes, dropout=dropout)
        self.features = nn.Sequential(*_convolutions(_TINY))
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = _classifier(16 * 2 * 2, 64, classes, self.dropout)


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


def _classifier(inputs: int, hidden: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(inplace=True),
        SampleDropout(dropout, layer=0),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        SampleDropout(dropout, layer=1),
        nn.Linear(hidden, classes),
    )
