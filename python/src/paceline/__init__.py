"""Paceline: which way of distributing this training is fastest here, by how much, and why?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.base.version import __version__
from paceline.train.rank.script.step import step

if TYPE_CHECKING:
    from paceline.api import Plan, Run, load, run
    from paceline.plan.spec.values import Target
    from paceline.train.strategies.reduction.ddp_factors import with_factors
    from paceline.train.training.graph_blocks import Blocks
    from paceline.train.training.task import (
        NamedParameters,
        Sums,
        Task,
        TaskOptions,
        TaskSettings,
    )

__all__ = [
    "Blocks",
    "NamedParameters",
    "Plan",
    "Run",
    "Sums",
    "Target",
    "Task",
    "TaskOptions",
    "TaskSettings",
    "__version__",
    "load",
    "run",
    "step",
    "with_factors",
]
_MODULES = {
    **dict.fromkeys(("Plan", "Run", "load", "run"), "paceline.api"),
    "Blocks": "paceline.train.training.graph_blocks",
    "Target": "paceline.plan.spec.values",
    "with_factors": "paceline.train.strategies.reduction.ddp_factors",
}


def __getattr__(name: str) -> Any:
    # Every rank imports this package, so the public interfaces are imported on first use.
    if name in __all__:
        module = _MODULES.get(name, "paceline.train.training.task")
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
