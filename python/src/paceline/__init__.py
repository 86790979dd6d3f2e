"""Paceline: which way of distributing this training is fastest here, by how much, and why?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.script_report import step

if TYPE_CHECKING:
    from paceline.api import Plan, Run, load, run

__version__ = "0.2.0"
__all__ = ["Plan", "Run", "__version__", "load", "run", "step"]


def __getattr__(name: str) -> Any:
    # Every rank imports this package, so the interface for Python is imported on first use.
    if name in __all__:
        return getattr(import_module("paceline.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
