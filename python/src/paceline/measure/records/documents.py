"""Documents of a run directory: trials, attempts, checkpoints, statuses, looks; its lock."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from paceline.base import errors
from paceline.base.errors import DataError, ExitCode, PacelineError, UsageError
from paceline.base.host.locks import try_lock
from paceline.collectives.host import wait_until
from paceline.measure.records.files import (
    FieldTypes,
    JsonlWriter,
    check_types,
    content_of,
    document,
    json_object,
    jsonable,
    read_json,
    read_jsonl,
    replacing,
    sync_folder,
    write_json,
    write_text,
)
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import SCHEMA, ContinuationRow, Failure, FailureRow, RankStatus
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
        fields = json_object(content_of(files.status), str(files.status))
    except FileNotFoundError:
        return None
    error = fields.pop("error", None)
    if isinstance(error, str):
        kind, _, message = error.partition(": ")
        error = {"kind": kind, "message": message, **{n: fields.get(n) for n in ("rank", "host")}}
    try:  # without pydantic, whose first use takes a failing rank longer than its peers may wait
        _check_rank(check_types(fields, _TYPES_OF_STATUS, str(files.status)))
        if error is not None:
            check_types(error, _TYPES_OF_FAILURE, f"{files.status}: error")
        return RankStatus(**fields, error=None if error is None else Failure(**error))
    except TypeError as wrong:
        raise DataError(f"{files.status}: expected the fields of a RankStatus: {wrong}") from wrong


_TYPES_OF_STATUS: FieldTypes = {
    "rank": (int,),
    "host": (str,),
    "pid": (int,),
    "process_started_unix_s": (int, float),
    "state": (str,),
    "secondary": (bool,),
    "start_ticks": (int, type(None)),
    "boot_id": (str, type(None)),
}
_TYPES_OF_FAILURE: FieldTypes = {
    "kind": (str,),
    "message": (str,),
    "rank": (int,),
    "host": (str, type(None)),
    "unix_s": (int, float, type(None)),
}
_MOST = 2**31  # of a rank and of a process id


def _check_rank(fields: Mapping[str, Any]) -> None:
    """Raise TypeError for numbers that no rank has, and for a state that is none."""
    for name in ("rank", "pid"):
        if not 0 <= fields.get(name, 0) < _MOST:
            raise TypeError(f"{name} is {fields[name]!r:.40}")
    if fields.get("state", "done") not in ("running", "done", "failed"):
        raise TypeError(f"state is {fields['state']!r:.40}")


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


_MOST_REPEATS = 1000  # of a run


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
    stopping = document(run.repeats, Stopping)
    if stopping is not None and not 0 < stopping.max_repeats <= _MOST_REPEATS:
        raise DataError(
            f"{run.repeats}: expected max_repeats from 1 to {_MOST_REPEATS}, got "
            f"{stopping.max_repeats}"
        )
    return stopping


def write_stopping(run: RunFiles, stopping: Stopping) -> None:
    """Replace the record."""
    write_json(run.repeats, jsonable(stopping))


_WAIT_S = 0.2  # `has_writer` holds the lock for a moment


@contextmanager
def only_writer(run: RunFiles) -> Iterator[bool]:
    """Hold the lock while the context is active; yield False if another process holds it.

    Raises OSError if the file cannot be written.
    """
    # neither emptied nor followed: in a run directory of somebody else it may be a link
    with open(run.lock, "a", opener=_no_link) as file:
        yield wait_until(lambda: try_lock(file), _WAIT_S)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def has_writer(run: RunFiles) -> bool:
    """Return whether a process of this machine is running trials into the run directory."""
    try:
        with run.lock.open() as file:
            return not try_lock(file, shared=True)
    except OSError:  # there is no lock, or it cannot be read
        return False


# --- checkpoints of a training as files: written atomically, checked when they are opened --------
#
#     checkpoints/step-000000040/rank-0-of-2.safetensors   the part of rank 0
#     checkpoints/step-000000040/rank-0-of-2.sha256        its checksum, as sha256sum writes it
#
# The number is that of the steps done. A file gets its name only when it is complete and on disk,
# and its checksum only afterwards. So a checkpoint is complete if every rank has a checksum,
# whenever its writers were killed. No rank waits for another one.

# Asks a rank for a checkpoint; the training goes on.
CHECKPOINT_SIGNAL = signal.SIGUSR1
KEPT = 2  # complete checkpoints: if the newest is damaged, there is another one
_STEP = re.compile(r"step-(\d{9,15})")
_PART = re.compile(r"rank-(\d{1,6})-of-(\d{1,6})\.sha256")
_CHECKSUM = re.compile(r"([0-9a-f]{64})  (\S+)\n")
_TEMPORARY, _DELETED = ".part", ".deleted-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. Its files may still be damaged; `check` reads them."""

    folder: Path
    steps: int  # done before it was written
    ranks: int  # that wrote it

    def part(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.folder / _name(rank, self.ranks)

    def check(self) -> None:
        """Read all files. Raises DataError that names one whose checksum is wrong."""
        for rank in range(self.ranks):
            _check(self.part(rank))


class CheckpointFolder:
    """All checkpoints of a trial."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def complete(self) -> list[Checkpoint]:
        """Return the complete checkpoints, the newest first."""
        found = (self._complete(steps, path) for steps, path in self._folders())
        return sorted((c for c in found if c), key=lambda c: c.steps, reverse=True)

    def newest(self, report: Callable[[str], object]) -> Checkpoint | None:
        """Return the newest checkpoint whose files are undamaged; None if there is none.

        report: gets a message for each damaged one, which is then removed.
        """
        for checkpoint in self.complete():
            try:
                checkpoint.check()
            except DataError as error:
                report(f"{error}; trying the checkpoint before it")
                self._remove(checkpoint.folder)
            else:
                return checkpoint
        return None

    def write(
        self, steps: int, rank: int, ranks: int, content: Callable[[HashedFile], object]
    ) -> int:
        """Write the part of a rank, durably; return its size in bytes.

        content: writes it. Raises OSError; the unfinished file is then removed.
        """
        folder = self.root / f"step-{steps:09d}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _name(rank, ranks)
        with _replacing(path) as file:
            content(file)
            digest, size = file.digest.hexdigest(), file.size
        with _replacing(path.with_suffix(".sha256")) as file:
            file.write(f"{digest}  {path.name}\n".encode())
        sync_folder(folder)
        sync_folder(self.root)
        return size

    def prune(self) -> None:
        """Remove what is older than the newest complete checkpoints, `KEPT` of them."""
        complete = self.complete()
        if len(complete) < KEPT:
            return
        oldest = complete[KEPT - 1].steps
        for steps, path in self._folders():
            if steps < oldest:
                self._remove(path)

    def clean(self, keep: Checkpoint | None) -> None:
        """Remove everything newer than `keep`, and what killed writers left.

        Call it while nobody writes. keep: the checkpoint from which the training continues; None
        removes all.
        """
        for steps, path in self._folders():
            if keep is None or steps > keep.steps or not self._complete(steps, path):
                self._remove(path)
        for path in self.root.glob(f"{_DELETED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.root.glob(f"step-*/.*{_TEMPORARY}"):
            path.unlink(missing_ok=True)

    def _folders(self) -> Iterator[tuple[int, Path]]:
        for path in sorted(self.root.glob("step-*")):
            found = _STEP.fullmatch(path.name)
            if found is not None and path.is_dir():
                yield int(found.group(1)), path

    @staticmethod
    def _complete(steps: int, folder: Path) -> Checkpoint | None:
        found = [match for path in folder.glob("*.sha256") if (match := _PART.fullmatch(path.name))]
        written: dict[int, set[int]] = {}
        for match in found:
            written.setdefault(int(match.group(2)), set()).add(int(match.group(1)))
        for ranks, own in written.items():
            if len(own) == ranks and max(own) < ranks:
                return Checkpoint(folder, steps, ranks)
        return None

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint; a kill meanwhile does not leave a damaged one."""
        doomed = self.root / f"{_DELETED}{folder.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class HashedFile:
    """A file that is being written, with the checksum of what it has so far."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0  # bytes

    def write(self, data: memoryview | bytes) -> None:
        """Write all of `data`."""
        rest = memoryview(data)
        self.digest.update(rest)
        self.size += len(rest)
        while rest:  # a full disk may accept a part of it; then the next write fails
            rest = rest[self._file.write(rest) :]


@contextmanager
def _replacing(path: Path) -> Iterator[HashedFile]:
    """Open a new file that replaces `path` durably if the block ends well."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        with FileIO(temporary, "w") as file:
            yield HashedFile(file)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _name(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


def _check(path: Path) -> None:
    """Raise DataError if a file of a checkpoint is missing or not as it was written."""
    try:
        expected = _CHECKSUM.fullmatch(path.with_suffix(".sha256").read_text("ascii"))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a readable part of a checkpoint: {error}") from error
    if expected is None or expected.groups() != (digest.hexdigest(), path.name):
        raise DataError(f"{path}: damaged: its SHA-256 is not the one written beside it")


# --- attempts at a trial: what one left is kept apart from the next, also if that continues ------
#
# Each rank changes only its own files. `begin_attempt` keeps what the attempt before has left
# apart, `continue_rows` removes the rows of steps that are repeated. So every step has one row.


def set_aside(run: RunFiles, trial: Trial) -> None:
    """Move the trial's directory, if there is one, to `attempts/<trial id>.<n>`.

    Its tensors are deleted: they are big, and nothing compares an attempt that did not finish. A
    trial with a complete checkpoint stays where it is, and continues.
    """
    files, trial_id = run.trial(trial.id), trial.id
    if not files.root.exists():
        return
    if trial.checkpoint is not None and CheckpointFolder(files.checkpoints).complete():
        leave_attempt(files)
        keep_log(files)
        files.outcome.unlink(missing_ok=True)
        return
    shutil.rmtree(files.weights.parent, ignore_errors=True)
    attempts = run.root / "attempts"
    attempts.mkdir(exist_ok=True)
    number = sum(1 for _ in attempts.glob(f"{trial_id}.*")) + 1
    files.root.rename(attempts / f"{trial_id}.{number}")


def leave_attempt(files: TrialFiles, failure: FailureRow | None = None) -> None:
    """Prepare the files of a trial for another attempt, while none of its ranks runs.

    failure: to be recorded.

    The statuses of the ranks and the failure that their launcher has reported are removed, because
    the next attempt would be taken for failed.
    """
    for _, rank in files.ranks():
        begin_attempt(rank)
        rank.status.unlink(missing_ok=True)
    files.reported.unlink(missing_ok=True)
    if failure is not None:
        with JsonlWriter(files.failures) as rows:
            rows.write(failure)


def keep_log(files: TrialFiles) -> None:
    """Give the launcher's log another name: the next attempt gets a log of its own."""
    if files.launcher_log.exists():
        number = sum(1 for _ in files.root.glob("launcher.*.log"))
        files.launcher_log.rename(files.root / f"launcher.{number}.log")


def begin_attempt(files: RankFiles) -> None:
    """Note in `interrupted.json` how the attempt before was left, if there was one.

    Call it before a rank's first write.
    Its spans and operations move to `attempts/<n>/`: they describe a part of the training only.
    """
    if not files.status.exists():
        return  # nothing, or what `leave_attempt` has noted already
    try:
        status = read_json(files.status)
    except DataError:
        status = {}
    interrupted = {
        "started_unix_s": status.get("process_started_unix_s"),
        "state": status.get("state"),
        "state_unix_s": files.status.stat().st_mtime,
    }
    before = files.root / "attempts"
    before.mkdir(exist_ok=True)
    own = before / str(sum(1 for _ in before.iterdir()))
    own.mkdir()
    for path in (files.spans, files.communication):
        if path.exists():
            path.rename(own / path.name)
    write_json(files.interrupted, interrupted)


def continue_rows(
    files: RankFiles, steps: int, *, process_started_unix_s: float, restored_unix_s: float
) -> None:
    """Remove the rows of all steps but the first `steps`, and record the continuation.

    Does nothing if `begin_attempt` found no earlier attempt.
    """
    if not files.interrupted.exists():
        return
    done, ended_unix_s = _last_step(files.steps)
    _keep(files.steps, lambda row: row["step"] < steps)
    _keep(files.sample_log, lambda row: row["step"] < steps)
    _keep(files.updates, lambda row: row["step"] < steps)
    _keep(files.evaluations, lambda row: row["steps"] <= steps)
    row = ContinuationRow(
        **{f"before_{name}": value for name, value in read_json(files.interrupted).items()},
        before_steps=done,
        before_ended_unix_s=ended_unix_s,
        process_started_unix_s=process_started_unix_s,
        resumed_steps=steps,
        restored_unix_s=restored_unix_s,
    )
    with JsonlWriter(files.continuations) as rows:
        rows.write(row)
    files.interrupted.unlink()


def _last_step(path: Path) -> tuple[int, float | None]:
    """Return the number of steps done, and when the last one ended."""
    last: dict[str, Any] | None = None
    if path.exists():
        for row in read_jsonl(path):
            last = row
    if last is None:
        return 0, None
    return last["step"] + 1, last["started_unix_s"] + last["step_s"]


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the wanted rows of a file, without an unfinished last row."""
    if not path.exists():
        return
    rows = [row for row in read_jsonl(path) if wanted(row)]
    with replacing(path) as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
