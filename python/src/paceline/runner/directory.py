"""The run directory: new, resumed, or refused."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.analysis.between_runs.differences import machine_identity
from paceline.errors import NotComparable, UsageError
from paceline.host.machine import machine_facts
from paceline.records.documents import only_writer
from paceline.records.files import read_json
from paceline.records.layout import RunFiles
from paceline.spec.loading import Spec, parse_spec


def check_machine(manifest: Mapping[str, Any], run_dir: Path) -> None:
    """Raise NotComparable if a run with this manifest was measured on another machine."""
    names = [machine_identity(each) for each in (manifest, {"host": machine_facts()})]
    if manifest.get("host") and names[0] != names[1]:
        before, now = (", ".join(each) for each in names)
        raise NotComparable(
            f"{run_dir}: expected a run of this machine ({now}), got one of another ({before}); "
            "measure on the machine of the run"
        )


def default_run_dir(experiment_name: str) -> Path:
    """Return `runs/<name>-<local date and time>` under the current directory."""
    return Path("runs") / f"{experiment_name}-{time.strftime('%Y%m%d-%H%M%S')}"


def recorded_spec(run_dir: Path) -> Spec:
    """Return the spec of a run or of a search, with the changes that it was started with.

    Raises UsageError if the directory contains none.
    """
    files = RunFiles(run_dir)
    # a spec with [tune] is that of the search; the run after it has the tuned spec
    manifest = files.tune.manifest if files.tune.manifest.exists() else files.manifest
    text = read_json(manifest).get("spec_toml") if manifest.exists() else None
    if not isinstance(text, str):
        raise UsageError(
            f"{run_dir}: expected a run to resume, found no spec in {files.manifest.name}; start "
            "the run again without --resume"
        )
    return Spec(parse_spec(text, str(manifest)), text)


def check_run_dir(files: RunFiles, spec: Spec, *, resume: bool) -> None:
    """Raise UsageError unless `files` is a run of this spec to resume, or may become one."""
    with _unusable(files.root):
        has_run = files.manifest.exists()
    if not resume:
        check_new(files)
    elif has_run:
        _check_resumed(files, spec)
    else:
        raise UsageError(
            f"{files.root}: expected a run to resume, found no {files.manifest.name}; "
            "leave out --resume to start one"
        )


def check_new(files: RunFiles) -> None:
    """Raise UsageError unless a run may begin here."""
    with _unusable(files.root):
        has_run = files.manifest.exists()
        others = [path for path in files.root.glob("*") if not _may_be_first(path, files)]
    if has_run:
        raise UsageError(
            f"{files.root}: holds a run already; complete it with `paceline run --resume "
            f"{files.root}`, or choose another directory with --out"
        )
    if others:
        raise UsageError(
            f"{files.root}: expected a new or empty directory; choose another with --out"
        )


def _may_be_first(path: Path, files: RunFiles) -> bool:
    """Return whether a path in a run directory may be there before the run.

    A search and the place of a copy may be, and what a run leaves that was killed before it had
    written its manifest.
    """
    left = (files.lock.name, f".{files.manifest.name}.")
    return path in (files.tune.root, files.copy) or path.name.startswith(left)


def _check_resumed(files: RunFiles, spec: Spec) -> None:
    before = read_json(files.manifest).get("spec_toml")
    if before != spec.text and (
        not isinstance(before, str) or parse_spec(before, str(files.manifest)) != spec.experiment
    ):
        raise UsageError(
            f"{files.root}: holds a run of another spec; resume it with its own spec (spec_toml in "
            f"{files.manifest.name}), as `paceline run --resume {files.root}` does, or start a new "
            "run with --out"
        )


@contextmanager
def made_run_dir(run_dir: Path) -> Iterator[None]:
    """Make the directory, so that a wrong path fails at once; remove it again after an error."""
    existed = run_dir.exists()
    with _unusable(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):  # it is not empty
                run_dir.rmdir()
        raise


@contextmanager
def only_runner(run_dir: Path) -> Iterator[None]:
    """Lock the run directory; refuse a second `paceline run` on it instead of waiting.

    At a good end, the states from which trials replay steps are removed: no trial needs them.
    """
    with ExitStack() as stack:
        with _unusable(run_dir):
            is_ours = stack.enter_context(only_writer(RunFiles(run_dir)))
        if not is_ours:
            raise UsageError(
                f"{run_dir}: another `paceline run` is writing here; wait for it, or choose "
                "another directory with --out"
            )
        yield
        shutil.rmtree(RunFiles(run_dir).replay, ignore_errors=True)


@contextmanager
def _unusable(run_dir: Path) -> Iterator[None]:
    """Raise UsageError if the file system does not allow to use `run_dir`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{run_dir}: expected a directory that can be written, got: {error.strerror or error}; "
            "choose another with --out"
        ) from error
