"""Paceline: which way of distributing this training is fastest here, by how much, and why?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.script_report import step

if TYPE_CHECKING:
    from paceline.api import Plan, Run, load, run
    from paceline.training.task import Blocks, NamedParameters, Task, TaskOptions, TaskSettings

__version__ = "0.2.0"
__all__ = [
    "Blocks",
    "NamedParameters",
    "Plan",
    "Run",
    "Task",
    "TaskOptions",
    "TaskSettings",
    "__version__",
    "load",
    "run",
    "step",
]
_OF_API = ("Plan", "Run", "load", "run")


def __getattr__(name: str) -> Any:
    # Every rank imports this package, so the public interfaces are imported on first use.
    if name in __all__:
        module = "paceline.api" if name in _OF_API else "paceline.training.task"
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
