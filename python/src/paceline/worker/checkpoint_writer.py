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
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from paceline.records.checkpoints import CheckpointFolder, HashedFile
    from paceline.training.state_files import Position

_LOWEST_PRIORITY = 19  # for setpriority(2), which on Linux applies to a single thread
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


@dataclass(slots=True)
class Copies:
    """Memory for copies of tensors, used again by each checkpoint."""

    _memory: dict[str, Tensor] = field(default_factory=dict)

    def allocate(self, state: RankState) -> None:
        """Get the memory for copies of this state, and touch its pages."""
        for each in state.tensors:
            if not self._fits(each.name, each.values):
                self._memory[each.name] = torch.zeros(each.values.shape, dtype=each.values.dtype)

    def copy(self, state: RankState) -> RankState:
        """Return a copy of the state; the next call overwrites it."""
        self.allocate(state)
        copied = []
        for each in state.tensors:
            values = self._memory[each.name].copy_(each.values)
            copied.append(replace(each, values=values))
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
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    def prepare(self, state: RankState) -> None:
        """Get memory for the copies in the background."""
        self._submit(lambda: self._copies.allocate(state))

    def write(
        self, position: Position, state: RankState, limit_s: float, interval_s: float | None
    ) -> float:
        """Copy the state and begin to write it; return the seconds that this took.

        It waits for at most `limit_s` for the checkpoint before. interval_s: for the record.
        """
        started_s, started_unix_s = time.perf_counter(), time.time()
        if not self._idle.wait(limit_s):
            self._report(f"the checkpoint before is not written after {limit_s:g} s")
            return time.perf_counter() - started_s
        copied = self._copies.copy(state)
        blocked_s = time.perf_counter() - started_s
        job = _Job(
            position=position,
            state=copied,
            started_unix_s=started_unix_s,
            blocked_s=blocked_s,
            interval_s=interval_s,
        )
        self._submit(lambda: self._write(job))
        return blocked_s

    def close(self) -> None:
        """Give up the checkpoint that is being written, and end the thread."""
        self._stopped.set()
        self._tasks.put(None)
        self._thread.join(_END_S)
        self._rows.close()

    def finish(self, limit_s: float) -> None:
        """Wait until the last checkpoint is written, for at most `limit_s`."""
        self._idle.wait(limit_s)

    def _submit(self, task: Callable[[], None]) -> None:
        self._idle.clear()
        self._tasks.put(task)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                if self._tasks.empty():
                    self._idle.set()

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
