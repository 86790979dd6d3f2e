"""Copy the state of a rank between two steps, and write it in a thread."""

from __future__ import annotations

import os
import queue
import threading
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from paceline.errors import PacelineWarning
from paceline.records.files import JsonlWriter
from paceline.records.rows import CheckpointRow
from paceline.training.state import RankState
from paceline.training.state_files import write_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from paceline.records.checkpoints import CheckpointFolder, HashedFile
    from paceline.training.state_files import Position

_LOWEST_PRIORITY = 19  # for setpriority(2), which on Linux applies to a single thread
_PIECE_BYTES = 16 << 20
_END_S = 10.0


class _Stopped(Exception):  # noqa: N818  (nobody sees it)
    """Ends the writing of a file that nobody needs any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    position: Position
    state: RankState
    started_unix_s: float
    blocked_s: float
    interval_s: float | None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A checkpoint of which one half has been copied."""

    state: RankState
    rest: Iterator[int]
    started_unix_s: float
    blocked_s: float


@dataclass(slots=True)
class Copies:
    """Memory for copies of tensors, used again by each checkpoint."""

    _memory: dict[str, Tensor] = field(default_factory=dict)

    def allocate(self, state: RankState) -> None:
        """Get the memory for copies of this state, and touch its pages."""
        for each in state.tensors:
            if not self._fits(each.name, each.values):
                self._memory[each.name] = torch.zeros(each.values.shape, dtype=each.values.dtype)

    def copy(self, state: RankState) -> Iterator[int]:
        """Copy the state piece by piece; yield the bytes of each."""
        self.allocate(state)
        for each in state.tensors:
            target, size = self._memory[each.name], each.values.element_size()
            for start in range(0, len(target), _PIECE_BYTES // size):
                piece = slice(start, start + _PIECE_BYTES // size)
                yield target[piece].copy_(each.values[piece]).numel() * size

    def of(self, state: RankState) -> RankState:
        """Return the copy of the state; the next one overwrites it."""
        copied = [replace(each, values=self._memory[each.name]) for each in state.tensors]
        return RankState(copied, dict(state.values))

    def _fits(self, name: str, values: Tensor) -> bool:
        own = self._memory.get(name)
        return own is not None and own.shape == values.shape and own.dtype == values.dtype


class CheckpointWriter:
    """Writes the checkpoints of one rank, one after the other, with the lowest priority."""

    def __init__(self, folder: CheckpointFolder, rank: int, ranks: int, rows: Path) -> None:
        """rows: file of the CheckpointRows."""
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._rows = JsonlWriter(rows)
        self._copies = Copies()
        self._begun: _Begun | None = None
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return self._tasks.unfinished_tasks == 0

    def wait_until_idle(self, limit_s: float) -> bool:
        """Wait until nothing is being written; return False if that takes more than `limit_s`."""
        with self._tasks.all_tasks_done:
            return self._tasks.all_tasks_done.wait_for(lambda: self.is_idle, limit_s)

    def prepare(self, state: RankState) -> None:
        """Get memory for the copies in the background."""
        self._tasks.put(lambda: self._copies.allocate(state))

    def begin(self, state: RankState, limit_s: float, *, whole: bool = False) -> None:
        """Copy the first half of the state; `end` copies the other one.

        The state must not change in between. So the copy delays two steps by half of its time each.
        It waits for at most `limit_s` for the checkpoint before, and is given up after that.
        whole: copy everything now.
        """
        started_s, started_unix_s = time.perf_counter(), time.time()
        if not self.wait_until_idle(limit_s):
            self._report(f"the checkpoint before is not written after {limit_s:g} s")
            return
        half = sum(t.values.numel() * t.values.element_size() for t in state.tensors) / 2
        rest, copied = self._copies.copy(state), 0
        for size in rest:
            copied += size
            if copied >= half and not whole:
                break
        self._begun = _Begun(state, rest, started_unix_s, time.perf_counter() - started_s)

    def end(self, position: Position, interval_s: float | None) -> None:
        """Copy the rest, and begin to write; do nothing without `begin`.

        interval_s: for the record.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        started_s = time.perf_counter()
        for _ in begun.rest:
            pass
        job = _Job(
            position=position,
            state=self._copies.of(begun.state),
            started_unix_s=begun.started_unix_s,
            blocked_s=begun.blocked_s + time.perf_counter() - started_s,
            interval_s=interval_s,
        )
        self._tasks.put(lambda: self._write(job))

    def close(self) -> None:
        """Give up the checkpoint that is being written, and end the thread."""
        self._stopped.set()
        self._tasks.put(None)
        self._thread.join(_END_S)
        self._rows.close()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as problem:  # noqa: BLE001  (the training goes on)
                self._report(f"no checkpoint: {type(problem).__name__}: {problem}")
            finally:
                self._tasks.task_done()

    def _write(self, job: _Job) -> None:
        size, error = None, None
        try:
            size = self._folder.write(
                job.position.steps, self._rank, self._ranks, lambda file: self._content(file, job)
            )
            if self._rank == 0:
                self._folder.prune()
        except _Stopped:
            return
        except OSError as problem:
            error = f"{problem.strerror or problem}"
            self._report(
                f"no checkpoint after {job.position.steps} steps: {self._folder.root}: {error}; "
                "the training goes on, and a failure loses the steps since the checkpoint before"
            )
        row = CheckpointRow(
            steps=job.position.steps,
            started_unix_s=job.started_unix_s,
            blocked_s=job.blocked_s,
            ended_unix_s=time.time(),
            written_bytes=size,
            error=error,
            interval_s=job.interval_s,
        )
        try:
            self._rows.write(row)
        except OSError as problem:
            self._report(f"no record of a checkpoint: {problem}")

    def _content(self, file: HashedFile, job: _Job) -> None:
        for _ in write_state(file, job.state, job.position):
            if self._stopped.is_set():
                raise _Stopped

    @staticmethod
    def _report(message: str) -> None:
        warnings.warn(message, PacelineWarning, stacklevel=2)
