"""Load the class of a task from an installed module or from a user's file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from paceline.errors import EnvironmentLacks, UsageError
from paceline.spec.workloads import split_task_path
from paceline.training.task import Task


def load_task_class(
    path: str, *, folder: Path | None = None, sha256: str | None = None
) -> type[Task]:
    """Return the class that "module:Class" or "file.py:Class" names.

    folder: of the trial; a copy of the file in it is preferred. sha256: expected checksum of the
    file. Raises UsageError if file or class does not exist, if the file has changed, or if the
    class is not a Task; EnvironmentLacks if the module cannot be imported.
    """
    place, name = split_task_path(path)
    try:
        if place.endswith(".py"):
            copy = None if folder is None else folder / Path(place).name
            file = copy if copy is not None and copy.is_file() else Path(place)
            module = _import_file(file, sha256)
        else:
            module = importlib.import_module(place)
    except UsageError:
        raise
    except Exception as error:
        raise EnvironmentLacks(
            f"task {path}: expected a module that can be imported, got {type(error).__name__}: "
            f"{error}"
        ) from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, Task):
        return found
    raise UsageError(
        f"task {path}: expected a subclass of paceline.Task with the name {name}, found "
        f"{'none' if found is None else type(found).__name__}; the file has {_task_names(module)}"
    )


def _import_file(file: Path, sha256: str | None) -> ModuleType:
    """Import a user's file under a name of its own, once for each content."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"task: expected the file {file}, got: {error.strerror}; give its path relative to the "
            "current directory"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise UsageError(
            f"task: {file} has changed since the trial was planned (expected sha256 {sha256}, "
            f"found {found}); plan the run again"
        )
    name = f"paceline_task_{found[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _task_names(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value is not Task
    ]
    return ", ".join(names) or "no task"
