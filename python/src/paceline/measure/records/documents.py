"""Documents of a run directory: planned trials, statuses of ranks, the ranking's looks; lock."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.base import errors
from paceline.base.errors import DataError, ExitCode, PacelineError, UsageError
from paceline.base.host.locks import try_lock
from paceline.collectives.host import wait_until
from paceline.measure.records.files import document, json_object, jsonable, write_json, write_text
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import SCHEMA, Failure, RankStatus
from paceline.plan.trials.trial import Trial


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
            status = read_status(rank_files)
        except DataError:
            continue  # it is of another version
        if status is not None:
            statuses.append(status)
    return statuses


def read_status(files: RankFiles) -> RankStatus | None:
    """Return the status of a rank; None if it has not written one.

    0.3.0 wrote the failure as text, `DataError: image 3 …`. Raises DataError if it is damaged.
    """
    try:
        fields = json_object(files.status.read_bytes(), str(files.status))
    except FileNotFoundError:
        return None
    error = fields.pop("error", None)
    if isinstance(error, str):
        kind, _, message = error.partition(": ")
        error = {"kind": kind, "message": message, **{n: fields.get(n) for n in ("rank", "host")}}
    try:  # without pydantic, whose first use takes a failing rank longer than its peers may wait
        return RankStatus(**fields, error=None if error is None else Failure(**error))
    except TypeError as wrong:
        raise DataError(f"{files.status}: expected the fields of a RankStatus: {wrong}") from wrong


def failure_of(error: BaseException, rank: int, host: str | None) -> Failure:
    """Return an error as the records of its rank contain it."""
    return Failure(
        kind=type(error).__name__, message=str(error), rank=rank, host=host, unix_s=time.time()
    )


def read_reported(files: TrialFiles) -> Failure | None:
    """Return the failure that the program that started the ranks has written; see Failure."""
    return document(files.reported, Failure)


def exit_code_of(failure: Failure | None) -> ExitCode:
    """Return the exit code of a failure; RANK_FAILED if the error is not Paceline's."""
    kind = None if failure is None else getattr(errors, failure.kind, None)
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
