"""Models of tests in several folders."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from paceline.training.task import Task
from paceline.workloads.vgg import vgg

TINY_VGG = f"{Path(__file__).resolve()}:TinyVGG"


class TinyVGG(Task):
    """Small network of the family of VGG; images from 32x32 pixels."""

    def model(self) -> nn.Module:
        channels = (8, 8, 0, 16, 16, 0, 16, 16, 0)
        return vgg(channels, 2, 64, self.settings.classes, dropout=self.settings.dropout)
