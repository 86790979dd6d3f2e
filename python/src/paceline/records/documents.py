"""Documents of a run directory: planned trials, statuses of ranks, the ranking's looks; lock."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline import errors
from paceline.errors import DataError, ExitCode, PacelineError, UsageError
from paceline.host.locks import try_lock
from paceline.host.processes import wait_until
from paceline.plan.trial import Trial
from paceline.records.files import document, jsonable, read_json, write_json, write_text
from paceline.records.layout import RunFiles, TrialFiles
from paceline.records.rows import SCHEMA, RankStatus


def write_trial(trial: Trial, files: TrialFiles) -> None:
    """Write `trial.json`, and beside it a copy of the file of the task, which every rank reads.

    Raises UsageError if that file cannot be read.
    """
    write_text(files.trial, trial.model_dump_json(indent=1) + "\n")
    if trial.training.task_sha256 is None:
        return
    source = Path(trial.training.task.rpartition(":")[0])
    try:
        shutil.copyfile(source, files.root / source.name)
    except OSError as error:
        raise UsageError(
            f"task: expected the file {source}, got: {error.strerror}; put it back, or change "
            "`task` in the spec"
        ) from error


def read_statuses(files: TrialFiles) -> list[RankStatus]:
    """Return the status of every rank that has written one, by rank."""
    statuses = []
    for _, rank_files in files.ranks():
        try:
            statuses.append(RankStatus(**read_json(rank_files.status)))
        except (DataError, TypeError):
            continue  # it does not exist yet, or is of another version
    return statuses


def error_text(error: BaseException) -> str:
    """Return an error as a status contains it: `EnvironmentLacks: expected …`."""
    return f"{type(error).__name__}: {error}"


def exit_code_of(text: str | None) -> ExitCode:
    """Return the exit code of an `error_text`; RANK_FAILED if the error is not Paceline's."""
    kind = getattr(errors, (text or "").partition(":")[0], None)
    if isinstance(kind, type) and issubclass(kind, PacelineError):
        return kind.exit_code if kind.exit_code != ExitCode.INTERNAL else ExitCode.RANK_FAILED
    return ExitCode.RANK_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRecord:
    """One look, after some repeats."""

    repeats: int
    level: float  # of the tests at this look
    undecided: dict[str, tuple[str, ...]]  # configurations by workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Content of `repeats.json`."""

    max_repeats: int
    tie_margin: float  # of a ratio
    looks: tuple[LookRecord, ...] = ()
    stopped: Literal["decided", "max_repeats", "time"] | None = None  # None: the run goes on
    schema: int = SCHEMA

    @property
    def level(self) -> float | None:
        """The level of the last look, at which the ranking is tested; None before the first."""
        return self.looks[-1].level if self.looks else None


def read_stopping(run: RunFiles) -> Stopping | None:
    """Return the record; None for a fixed number of repeats. Raises DataError if it is damaged."""
    return document(run.repeats, Stopping)


def write_stopping(run: RunFiles, stopping: Stopping) -> None:
    """Replace the record."""
    write_json(run.repeats, jsonable(stopping))


_WAIT_S = 0.2  # `has_writer` holds the lock for a moment


@contextmanager
def only_writer(run: RunFiles) -> Iterator[bool]:
    """Hold the lock while the context is active; yield False if another process holds it.

    Raises OSError if the file cannot be written.
    """
    with run.lock.open("w") as file:
        yield wait_until(lambda: try_lock(file), _WAIT_S)


def has_writer(run: RunFiles) -> bool:
    """Return whether a process of this machine is running trials into the run directory."""
    try:
        with run.lock.open() as file:
            return not try_lock(file, shared=True)
    except OSError:  # there is no lock, or it cannot be read
        return False
