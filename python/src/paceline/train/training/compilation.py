"""Compile a model (torch.compile), except for layers that Paceline has replaced.

Such a layer sums over ranks, keeps factors or draws the masks of samples. It is not compiled: torch
calls it between compiled parts of the model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.base.errors import EnvironmentLacks
from paceline.plan.trials.trial import Training
from paceline.train.training.dropout import SampleDropout

_CACHE, _WORKERS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"


@contextmanager
def compiler_settings(training: Training) -> Iterator[None]:
    """Keep compiled code in a private folder, and compile without further processes.

    Call it before torch is used. torch's default folder has a predictable name in /tmp; a folder
    that the user names (TORCHINDUCTOR_CACHE_DIR) is used and kept. Raises EnvironmentLacks if there
    is no C++ compiler.
    """
    if not training.compile:
        yield
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise EnvironmentLacks(
            f"compile: torch.compile needs a C++ compiler, found no {compiler}; install g++, set "
            "CXX, or remove compile"
        )
    os.environ[_WORKERS] = "1"
    if os.environ.get(_CACHE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="paceline-compiled-") as folder:
        os.environ[_CACHE] = folder
        try:
            yield
        finally:
            del os.environ[_CACHE]


def compile_model(model: nn.Module, training: Training) -> None:
    """Let the model be compiled when it is first called, if the training requests it.

    Call it after the layers were replaced.
    """
    if not training.compile:
        return
    for module in model.modules():
        if isinstance(module, SampleDropout) or "forward" in vars(module):
            whole = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
            module.forward = whole
    model.compile()
