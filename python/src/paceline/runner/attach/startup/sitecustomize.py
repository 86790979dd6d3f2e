"""Record this process, if it trains, under `paceline watch -- COMMAND`.

Python imports this module at its start, in every Python process of the command. Most of them do not
train, so it imports little. A process is recorded from the end of its import of torch on if a
launcher has given it a rank, otherwise from its first optimiser on: launchers and helpers have
none.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_FOLDER_VARIABLE = "PACELINE_ATTACH"  # of the trial; paceline.runner.trials.attach sets it
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_OF_MULTIPROCESSING = "--multiprocessing-fork"  # an argument of its children, such as data loaders
_NAME, _HERE = "sitecustomize", Path(__file__).parent


class _AfterTorch:
    """Finds torch as Python would, and acts when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(  # type: ignore[method-assign]
                self._execute, spec.loader.exec_module
            )
        return spec

    def _execute(self, execute: Any, module: Any) -> None:
        execute(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _torch_is_imported(module)


def _torch_is_imported(torch: Any) -> None:
    if any(name in os.environ for name in _RANK_VARIABLES):
        _record()
        return
    optimizer = torch.optim.Optimizer
    function = optimizer.__init__

    @functools.wraps(function)
    def initialise(self: Any, *arguments: Any, **named: Any) -> None:
        if optimizer.__init__ is initialise:
            optimizer.__init__ = function
            _record()
        function(self, *arguments, **named)

    optimizer.__init__ = initialise


def _record() -> None:
    try:
        from paceline.runner.attach.rank import record  # noqa: PLC0415  (most processes do not need it)

        record(Path(os.environ[_FOLDER_VARIABLE]))
    except Exception as error:  # noqa: BLE001  (the training goes on)
        text = f"paceline: this process is not recorded: {type(error).__name__}: {error}"
        print(text, file=sys.stderr, flush=True)


def _import_next() -> None:
    """Import the module of this name that Python would have imported without this folder."""
    path = [entry for entry in sys.path if Path(entry) != _HERE]
    spec = PathFinder.find_spec(_NAME, path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


if _FOLDER_VARIABLE in os.environ and _OF_MULTIPROCESSING not in sys.orig_argv:
    sys.meta_path.insert(0, _AfterTorch())
if __name__ == _NAME:  # Python's own import, and not one of this package
    _import_next()
