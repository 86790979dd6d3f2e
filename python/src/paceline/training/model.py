"""Common structure of the models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Model(nn.Module):
    """Convolutions, pooling to a fixed size, and fully connected layers: torchvision's three
    parts."""

    features: nn.Sequential
    avgpool: nn.Module
    classifier: nn.Sequential

    def __init__(self, classes: int, *, dropout: bool) -> None:
        """classes: outputs of the last layer. Without dropout, dropout layers do nothing."""
        super().__init__()
        self.classes = classes
        self.dropout = 0.5 if dropout else 0.0

    def forward(self, images: Tensor) -> Any:
        """Return logits of shape (samples, classes) for images of shape (samples, 3, height,
        width)."""
        return self.classifier(self.avgpool(self.features(images)).flatten(1))

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Return the model as a sequence: calling the layers in turn is `forward`. Parameter names
        of the model are the name of the layer, a dot, and the name within the layer."""
        return [
            *((f"features.{name}", layer) for name, layer in self.features.named_children()),
            ("avgpool", self.avgpool),
            ("flatten", nn.Flatten(1)),
            *((f"classifier.{name}", layer) for name, layer in self.classifier.named_children()),
        ]

    def draw_weights(self) -> None:
        """Initialise all weights from torch's default generator, as nn's layers do."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.reset_parameters()
