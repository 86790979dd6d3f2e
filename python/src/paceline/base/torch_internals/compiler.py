"""torch's compiler, imported only by a training that uses it.

Every optimiser, DistributedDataParallel, `init_process_group` and FakeTensorMode use the package
`torch._dynamo`, which takes as long to import as most other modules of a rank together. Outside of
compiled code they need its settings, and four functions that do nothing there (torch 2.13:
`torch/_compile.py`, `optim/optimizer.py`, `nn/parallel/distributed.py`,
`distributed/distributed_c10d.py`, `_subclasses/fake_tensor.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from paceline.base.host.memory import permanent_objects

_NAME, _SETTINGS = "torch._dynamo", "torch._dynamo.config"
_LOCK = threading.Lock()


class _Unused(ModuleType):
    """The compiler, until something else of it is used. That imports it."""

    __file__ = None  # inspect.getmodule() asks every module for it

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__spec__ = importlib.util.find_spec(_NAME)
        self.__path__ = [str(Path(torch.__file__).with_name("_dynamo"))]
        self.trace_rules, self.utils = _UnusedRules(), _UnusedUtilities()
        self.config = _settings(Path(self.__path__[0]) / "config.py")

    def graph_break(self) -> None:
        """Do nothing, as outside of compiled code."""

    def disable(self, fn: Any = None, *words: Any, wrapping: bool = True, **others: Any) -> Any:
        """Return `fn` if torch excludes a function of its own; import the compiler for others."""
        if fn is not None and not wrapping:
            return fn
        return _imported().disable(fn, *words, wrapping=wrapping, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(), name)


class _UnusedRules:
    """The module `torch._dynamo.trace_rules`, until something else of it is used."""

    def clear_lru_cache(self) -> None:
        """Do nothing: there is no cache yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported().trace_rules, name)


class _UnusedUtilities:
    """The module `torch._dynamo.utils`, until something else of it is used."""

    def get_optimize_ddp_mode(self) -> str:
        """Return the mode of the default settings; import the compiler for others."""
        if sys.modules[_SETTINGS].optimize_ddp is True:
            return "ddp_optimizer"
        return str(_imported().utils.get_optimize_ddp_mode())

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported().utils, name)


class _Finder(MetaPathFinder):
    """Finds a module of the unused compiler by importing all of it."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        is_unused = isinstance(sys.modules.get(_NAME), _Unused)
        if not is_unused or not name.startswith(f"{_NAME}."):
            return None
        _imported()
        importlib.import_module(name)
        return ModuleSpec(name, _Loaded(sys.modules.pop(name)))


class _Loaded(Loader):
    """Gives a module to an import that began before another one loaded it, which would load it
    again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _settings(file: Path) -> ModuleType:
    """Import the settings without the package that contains them, which takes them over."""
    spec = importlib.util.spec_from_file_location(_SETTINGS, file)
    assert spec is not None, "a file has a spec"
    assert spec.loader is not None
    settings = sys.modules[_SETTINGS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(settings)
    return settings


def import_now() -> None:
    """Import torch's compiler, for a process that uses more of it."""
    importlib.import_module(_NAME)


# Measured with a `sequential` trial of `tiny` and torch 2.13, with and without in turn, 8 pairs, on
# two cores beside other programs: until its first step a rank needs 1.7 s less CPU time (95 %
# interval 1.0 to 2.4 s) and 145 MiB less memory.
def import_when_used() -> None:
    """Let this process train without the import of torch's compiler."""
    with _LOCK:
        if _NAME not in sys.modules:
            sys.modules[_NAME] = torch._dynamo = _Unused()
            sys.meta_path.insert(0, _Finder())


def _imported() -> ModuleType:
    """Import the compiler in place of its stand-in."""
    with _LOCK:
        is_first = isinstance(sys.modules.get(_NAME), _Unused)
        if is_first:
            del sys.modules[_NAME], torch._dynamo
    # a reference to the stand-in leads here at every use
    with permanent_objects() if is_first else nullcontext():
        return importlib.import_module(_NAME)
