"""The user's own code that the ranks of a trial ran: script, task file, and what they import.

Each rank records the files with their checksums (`sources.json`), so that a run is continued, and
two runs are compared, in knowledge of the code. Installed packages are left out, as manifests have
their versions.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from paceline.measure.records.files import document, write_json
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.plan.trials.trial import Training

# Main modules are those of launchers, tasks are recorded with the file that they are copies of.
_APART = ("__main__", "__mp_main__", "paceline")
_TASK = "paceline_task_"
_PACKAGES = {"site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file as a rank has read it."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Files by the name under which they were imported, such as `models/net.py`."""

    files: dict[str, SourceFile]


def write_sources(training: Training, own: RankFiles) -> None:
    """Write the files of the user's code that this process has imported so far.

    A file keeps its first checksum: it may change while the training goes on.
    """
    before = document(own.sources, Sources)
    files = {} if before is None else before.files
    paths = {file.path for file in files.values()}
    for name, file in _imported(training):
        if name not in files and file.path not in paths:
            files[name] = file
            paths.add(file.path)
    if files:
        write_json(own.sources, Sources(files=files))


def read_sources(files: TrialFiles) -> dict[str, dict[str, str]]:
    """Return the files that the ranks of a trial have imported: by name, path by checksum.

    A file has several checksums if ranks have read different versions.
    """
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for _, rank in files.ranks():
        sources = document(rank.sources, Sources)
        for name, file in ({} if sources is None else sources.files).items():
            found[name][file.sha256] = file.path
    return dict(found)


def changed_sources(files: TrialFiles) -> set[str]:
    """Return the names of the files of a trial that are different now.

    A file that is gone is left out: where it is still needed, the script fails and says so.
    """
    return {
        name
        for name, versions in read_sources(files).items()
        for path in set(versions.values())
        if _sha256(path) not in {None, *versions}
    }


def _imported(training: Training) -> Iterator[tuple[str, SourceFile]]:
    if training.task_sha256 is not None:
        task = training.task.rpartition(":")[0]
        yield Path(task).name, SourceFile(path=task, sha256=training.task_sha256)
    paths: dict[str, str] = {}
    if training.script is not None:
        paths[Path(training.script.path).name] = training.script.path
    for name, module in sorted(sys.modules.items()):
        found = _own_file(name, module)
        if found is not None:
            paths.setdefault(_file_name(name, found), found)
    for name, path in paths.items():
        sha256 = _sha256(path)
        if sha256 is not None:
            yield name, SourceFile(path=path, sha256=sha256)


def _own_file(name: str, module: ModuleType) -> str | None:
    """Return the file of a module that is no part of an installed package.

    Compilers give their packages modules whose files are elsewhere, so the package decides.
    """
    top = name.partition(".")[0]
    path = _file_of(module)
    if path is None or top in _APART or top.startswith(_TASK):
        return None
    package = _file_of(sys.modules.get(top)) or path
    is_installed = package.startswith(_installed()) or _PACKAGES & set(package.split("/"))
    return None if is_installed else path


def _file_of(module: object) -> str | None:
    """Return the absolute path of a module's file, without asking modules that load themselves."""
    path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return os.path.abspath(path) if isinstance(path, str) else None  # noqa: PTH100  (links stay)


def _file_name(module: str, path: str) -> str:
    """Return the path of a module's file below the folder in which its package is."""
    *folders, last = module.split(".")
    file = Path(path)
    own = [last, file.name] if file.stem == "__init__" else [last + file.suffix]
    return "/".join([*folders, *own])


@cache
def _installed() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of those that a launcher brings along."""
    places: list[str | None] = [
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    places += [site.getusersitepackages(), os.environ.get("SPARK_HOME")]
    return tuple(f"{place}/" for place in places if place)


def _sha256(path: str) -> str | None:
    """Return the checksum of a file; None if it cannot be read, as in an archive."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
