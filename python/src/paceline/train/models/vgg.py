"""VGG16 (Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition,
arXiv:1409.1556, configuration D), layer for layer as in torchvision, so that its weights load.
"""

from __future__ import annotations

from torch import nn

from paceline.train.models.base import Model
from paceline.train.models.dropout import SampleDropout

# Output channels of the 3x3 convolutions; 0 is a 2x2 max pooling.
_LAYERS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


class VGG16(Model):
    """138,357,544 parameters with 1000 classes; images from 32x32 pixels, made for 224x224."""

    def __init__(self, classes: int, *, dropout: bool) -> None:
        super().__init__(classes, dropout=dropout)
        self.features = nn.Sequential(*_convolutions())
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            SampleDropout(self.dropout, layer=0),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            SampleDropout(self.dropout, layer=1),
            nn.Linear(4096, classes),
        )

    def draw_weights(self) -> None:
        """As torchvision: He's normal for convolutions (fan out), normal 0.01 for the others."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            else:
                continue
            assert module.bias is not None
            nn.init.zeros_(module.bias)


def _convolutions() -> list[nn.Module]:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in _LAYERS:
        if outputs == 0:
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
            continue
        layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
        inputs = outputs
    return layers
