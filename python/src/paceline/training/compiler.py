"""torch's compiler, imported only by a training that uses it.

Every optimiser imports `torch._dynamo` before its first step, which takes as long as most other
imports of a rank together. An ordinary step calls only two of its functions, which do nothing
outside of compiled code (torch 2.13, `torch/_compile.py` and `torch/optim/optimizer.py`).
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_LOCK = threading.Lock()


class _Unused(ModuleType):
    """The compiler, until something else of it is used. That imports it."""

    __file__ = None  # inspect.getmodule() asks every module for it

    def graph_break(self) -> None:
        """Do nothing, as outside of compiled code."""

    def disable(self, fn: Any = None, *words: Any, wrapping: bool = True, **others: Any) -> Any:
        """Return `fn` if torch excludes a function of its own; import the compiler for others."""
        if fn is not None and not wrapping:
            return fn
        return _imported().disable(fn, *words, wrapping=wrapping, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(), name)


def import_when_used() -> None:
    """Let the optimisers of this process step without the import of torch's compiler."""
    with _LOCK:
        if _NAME not in sys.modules:
            sys.modules[_NAME] = torch._dynamo = _Unused(_NAME)  # noqa: SLF001  (that of torch)


def _imported() -> ModuleType:
    """Import the compiler in place of its stand-in."""
    with _LOCK:
        if isinstance(sys.modules.get(_NAME), _Unused):
            del sys.modules[_NAME], torch._dynamo  # noqa: SLF001  (that of torch)
    return importlib.import_module(_NAME)
