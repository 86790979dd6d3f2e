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
    """Layers and initial weights of networks of this family."""

    def __init__(
        self, channels: tuple[int, ...], pooled: int, hidden: int, classes: int, *, dropout: bool
    ) -> None:
        """pooled: side of the last feature maps in pixels; hidden: units of linear layers."""
        super().__init__(classes, dropout=dropout)
        inputs = [c for c in channels if c][-1] * pooled**2
        self.features = nn.Sequential(*_convolutions(channels))
        self.avgpool = nn.AdaptiveAvgPool2d((pooled, pooled))
        self.classifier = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.ReLU(inplace=True),
            SampleDropout(self.dropout, layer=0),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            SampleDropout(self.dropout, layer=1),
            nn.Linear(hidden, classes),
        )

    def draw_weights(self) -> None:
        """Draw as torchvision: He's normal for convolutions (fan out), normal 0.01 for others."""
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
        super().__init__(_VGG16, 7, 4096, classes, dropout=dropout)


class TinyVGG(_VGG):
    """Small network of the same family for tests; images from 32x32 pixels. In no workload."""

    def __init__(self, classes: int, *, dropout: bool) -> None:
        super().__init__(_TINY, 2, 64, classes, dropout=dropout)


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
