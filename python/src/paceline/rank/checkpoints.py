"""Checkpoints of one rank: open the newest one at the start, write new ones between steps.

The state is copied between two steps, and a thread writes it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import queue
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError, PacelineWarning
from paceline.plan.rank_context import RankContext
from paceline.plan.sample_order import SampleOrder
from paceline.plan.trial import Trial
from paceline.rank.checkpoint_times import (
    AnnouncedSteps,
    Announcements,
    DalyInterval,
    EverySeconds,
    Times,
)
from paceline.rank.peers import Peers
from paceline.records.checkpoints import CHECKPOINT_SIGNAL, Checkpoint, CheckpointFolder, HashedFile
from paceline.records.files import JsonlWriter
from paceline.records.layout import TrialFiles
from paceline.records.rows import CheckpointRow, StepRow
from paceline.spec.tables import CheckpointSettings
from paceline.training.state import RankState
from paceline.training.state_files import Position, StateFiles, write_state
from paceline.training.strategy import LocalStrategy

# Values of a training that its state does not depend on.
_WITHOUT_EFFECT = {"dataset", "cache", "reading", "memory_format", "warmup_steps", "task"}


def training_sha256(trial: Trial, order: SampleOrder, without: Collection[str] = ()) -> str:
    """Return a checksum of everything that decides what a training computes, except its layout.

    without: names of further training values that do not count.
    """
    values = trial.training.model_dump(mode="json", exclude=_WITHOUT_EFFECT.union(without))
    values["task"] = trial.training.task.rpartition(":")[2]
    values["row_group_rows"] = [int(rows) for rows in order.row_group_rows]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """Opens and writes the checkpoints of a trial as one of its ranks."""

    def __init__(
        self,
        trial: Trial,
        context: RankContext,
        files: TrialFiles,
        order: SampleOrder,
        strategy: LocalStrategy,
        peers: Peers,
        chosen: Checkpoint | None,
    ) -> None:
        """chosen: the checkpoint to continue from. Raises UsageError if the strategy cannot give
        its state."""
        strategy.rank_state()
        self._chosen = chosen
        self._context, self._limits, self._order = context, trial.limits, order
        self._strategy, self._peers = strategy, peers
        self._folder = CheckpointFolder(files.checkpoints)
        self._task_sha256 = training_sha256(trial, order)
        self._replicas = trial.placement.replicas if strategy.has_replica_state else 1
        assert trial.checkpoint is not None, "else there is nothing to do"
        self._every_steps = trial.checkpoint.every_steps
        self._times = self._new_times(trial.checkpoint)
        self._writer = CheckpointWriter(
            self._folder, context.rank, context.world_size, files.rank(context.rank).checkpoints
        )
        self._has_memory = False
        self._step_s = 0.0  # time of the last step
        self._pending = False  # due, but the state did not exist in that step

    def restore(self) -> None:
        """Restore the chosen checkpoint, if there is one; collective.

        Raises DataError if it belongs to another training, or is not valid.
        """
        checkpoint = self._chosen
        if checkpoint is None:
            return
        saved = StateFiles(checkpoint)
        if saved.position.task_sha256 != self._task_sha256:
            raise DataError(
                f"{checkpoint.folder}: is a checkpoint of another training: the model, the data or "
                "a training value has changed; remove the folder, or start a new run with --out"
            )
        self._strategy.restore(saved)
        if checkpoint.ranks == self._context.world_size:
            _restore_random(saved, self._context.rank)

    @property
    def first_step(self) -> int:
        """The first step to train."""
        return 0 if self._chosen is None else self._chosen.steps

    def updated(self, step: int) -> None:
        """Write a checkpoint, if one is due after this step; call it after the optimiser."""
        done = step + 1
        is_due = self._times.is_due(done, self._step_s, idle=self._writer.is_idle)
        is_due |= self._every_steps is not None and done % self._every_steps == 0
        if done == self._order.steps or not (self._pending or is_due):
            return
        pauses = self._strategy.pauses_for_checkpoints
        if pauses:  # no rank changes the state until all have copied it
            self._strategy.settle()
        state = self._strategy.rank_state()
        self._pending = state is None
        if state is None:
            return
        _add_random(state, self._context.rank)
        limit_s = self._limits.collective_s
        position = Position(steps=done, task_sha256=self._task_sha256, replicas=self._replicas)
        self._writer.write(state, position, limit_s, self._times.interval_s)
        if pauses:  # others may first wait for the checkpoint before
            self._peers.world(f"checkpoint/{done}").barrier(2 * limit_s)

    def step_ended(self, row: StepRow) -> None:
        """Take the time of a step, and get memory for copies after the first one."""
        self._step_s = row.step_s
        if not self._has_memory:
            state = self._strategy.rank_state()
            self._has_memory = state is not None
            if state is not None:
                self._writer.prepare(state)

    @contextmanager
    def on_signal(self) -> Iterator[None]:
        """Write a checkpoint at SIGUSR1, which Slurm can send before it ends a job."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return

        def request(_number: int, _frame: FrameType | None) -> None:
            self._times.request()

        before = signal.signal(CHECKPOINT_SIGNAL, request)
        try:
            yield
        finally:
            signal.signal(CHECKPOINT_SIGNAL, before)

    def close(self) -> None:
        """End the threads. A checkpoint that is not complete is given up."""
        self._times.close()
        self._writer.close()

    def _new_times(self, settings: CheckpointSettings) -> Times:
        """Return what decides beside the number of steps; without seconds, it takes requests."""
        store = self._peers.second_store()
        announcements = None
        if store is not None:
            others = self._context.world_size - 1
            answering = others if self._strategy.pauses_for_checkpoints else 0
            announcements = Announcements(store, answering, self._limits.collective_s)
            if not self._context.is_first:
                return AnnouncedSteps(announcements)
        interval: float | DalyInterval | None
        if settings.every_s is None or isinstance(settings.every_s, float | int):
            interval = settings.every_s
        else:
            assert settings.mtbf_s is not None, 'the spec requires it for "auto"'
            interval = DalyInterval(settings.mtbf_s)
        return EverySeconds(interval, announcements, self._strategy.steps_ahead)


def choose_checkpoint(trial: Trial, files: TrialFiles, peers: Peers) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, the same on all ranks; collective.

    Rank 0 reads them, and removes what is damaged or unfinished. None if the trial has none.
    """
    if trial.checkpoint is None:
        return None
    folder, text = CheckpointFolder(files.checkpoints), ""
    if peers.is_first:
        found = folder.newest(_warn)
        folder.clean(found)
        text = "" if found is None else f"{found.steps} {found.ranks} {found.folder.name}"
    words = peers.of_first_rank("checkpoint", text).split()
    return Checkpoint(folder.root / words[2], int(words[0]), int(words[1])) if words else None


def _warn(message: str) -> None:
    warnings.warn(message, PacelineWarning, stacklevel=2)


def _add_random(state: RankState, rank: int) -> None:
    """Add the states of the random generators, which a task may use in its own code."""
    state.add_whole(f"random/{rank}/torch", torch.get_rng_state())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state.add_whole(f"random/{rank}/cuda", torch.cuda.get_rng_state())
    version, words, normal = random.getstate()
    state.values[f"random/{rank}/python"] = [version, list(words), normal]
    generator = np.random.get_state(legacy=False)
    assert isinstance(generator, dict)
    kept = copy.deepcopy(generator)
    kept["state"]["key"] = kept["state"]["key"].tolist()
    state.values[f"random/{rank}/numpy"] = kept


def _restore_random(saved: StateFiles, rank: int) -> None:
    """Set the random generators. Raises DataError if their saved states are not valid."""
    try:
        for name, restore in (("torch", torch.set_rng_state), ("cuda", _set_cuda_state)):
            tensor = saved.tensor(f"random/{rank}/{name}")
            if tensor is not None:
                restore(tensor.clone())
        of_python: Any = saved.value(f"random/{rank}/python")
        if of_python is not None:
            version, words, normal = of_python
            random.setstate((version, tuple(words), normal))
        of_numpy: Any = saved.value(f"random/{rank}/numpy")
        if of_numpy is not None:
            key = np.array(of_numpy["state"]["key"], dtype=np.uint32)
            np.random.set_state({**of_numpy, "state": {**of_numpy["state"], "key": key}})
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"{saved.checkpoint.folder}: the states of its random generators are not valid: {error}"
        ) from error


def _set_cuda_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


_LOWEST_PRIORITY = 19  # for setpriority(2), which on Linux applies to a single thread
_END_S = 10.0


class _Stopped(Exception):  # noqa: N818  (nobody sees it)
    """Ends the writing of a file that nobody needs any more."""


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
        """Return a copy of the state; the next one overwrites it."""
        self.allocate(state)
        copied = [
            replace(each, values=self._memory[each.name].copy_(each.values))
            for each in state.tensors
        ]
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

    def write(
        self, state: RankState, position: Position, limit_s: float, interval_s: float | None = None
    ) -> None:
        """Copy the state, and write it in the background.

        It waits for at most `limit_s` for the checkpoint before, and is given up after that.
        interval_s: for the record.
        """
        started_s, started_unix_s = time.perf_counter(), time.time()
        if not self.wait_until_idle(limit_s):
            _warn(f"the checkpoint before is not written after {limit_s:g} s")
            return
        copied = self._copies.copy(state)
        row = CheckpointRow(
            steps=position.steps,
            started_unix_s=started_unix_s,
            blocked_s=time.perf_counter() - started_s,
            ended_unix_s=0.0,  # as the next one, when it is written
            written_bytes=None,
            interval_s=interval_s,
        )
        self._tasks.put(lambda: self._write(copied, position, row))

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
                _warn(f"no checkpoint: {type(problem).__name__}: {problem}")
            finally:
                self._tasks.task_done()

    def _write(self, state: RankState, position: Position, row: CheckpointRow) -> None:
        try:
            size = self._folder.write(
                row.steps,
                self._rank,
                self._ranks,
                lambda file: self._content(file, state, position),
            )
            if self._rank == 0:
                self._folder.prune()
            row = replace(row, written_bytes=size)
        except _Stopped:
            return
        except OSError as problem:
            error = f"{problem.strerror or problem}"
            _warn(
                f"no checkpoint after {row.steps} steps: {self._folder.root}: {error}; the "
                "training goes on, and a failure loses the steps since the checkpoint before"
            )
            row = replace(row, error=error)
        try:
            self._rows.write(replace(row, ended_unix_s=time.time()))
        except OSError as problem:
            _warn(f"no record of a checkpoint: {problem}")

    def _content(self, file: HashedFile, state: RankState, position: Position) -> None:
        for _ in write_state(file, state, position):
            if self._stopped.is_set():
                raise _Stopped
