"""Models of tests in several folders."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from paceline.train.training.task import Task
from paceline.train.workloads.convolutional import vgg

TINY_VGG = f"{Path(__file__).resolve()}:TinyVGG"


class TinyVGG(Task):
    """Small network of the family of VGG; images from 32x32 pixels."""

    def model(self) -> nn.Module:
        stages = ((8, 2), (16, 2), (16, 2))
        return vgg(stages, 2, 64, self.settings.classes, dropout=self.settings.dropout)
