"""A task whose training fails on one host, in the way that an option names."""

from __future__ import annotations

import os
import signal
from typing import Literal

from torch import Tensor

from paceline.collectives.host import host_name
from paceline.train.workloads.build import BuiltInOptions
from paceline.train.workloads.convolutional import TinyAlexNet

_GOOD_STEPS = 3


class Options(BuiltInOptions):
    """The fault and its host."""

    host: str = ""
    fault: Literal["error", "killed"] = "error"


class Faulty(TinyAlexNet):
    """The task of workload `tiny`, with the fault in the fourth step."""

    Options = Options

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._losses = getattr(self, "_losses", 0) + 1
        if host_name() == self.options.host and self._losses > _GOOD_STEPS:
            if self.options.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted on this host")
        return super().loss(outputs, targets)
