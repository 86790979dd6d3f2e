"""A task that trains slowly, or takes memory, in containers of YARN only, so not in a baseline."""

from __future__ import annotations

import os
import time

from torch import Tensor

from paceline.collectives.host import host_name
from paceline.train.workloads.build import BuiltInOptions
from paceline.train.workloads.convolutional import TinyAlexNet

_VARIABLE_OF_YARN = "CONTAINER_ID"


class Options(BuiltInOptions):
    """Faults of a step."""

    sleep_s: float = 0.0
    taken_mib: int = 0
    taken_on: str = ""  # the host


class Faulty(TinyAlexNet):
    """The task of workload `tiny`, with faults."""

    Options = Options

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if _VARIABLE_OF_YARN in os.environ:
            time.sleep(self.options.sleep_s)
            if host_name() == self.options.taken_on:
                self._taken = [*getattr(self, "_taken", []), b"1" * (self.options.taken_mib << 20)]
        return super().loss(outputs, targets)
