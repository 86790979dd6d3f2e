"""Checkpoints of one rank: open the newest one at the start, write new ones between steps.

The state is copied between two steps, and a thread writes it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.base.errors import DataError, PacelineWarning
from paceline.measure.records.documents import (
    CHECKPOINT_SIGNAL,
    Checkpoint,
    CheckpointFolder,
    HashedFile,
)
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import CheckpointRow, StepRow
from paceline.plan.trials.sample_order import SampleOrder
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.rank.peers import Peers
from paceline.train.training.state import RankState
from paceline.train.training.state_files import Position, StateFiles, write_state
from paceline.train.training.strategy import LocalStrategy

if TYPE_CHECKING:
    from paceline.collectives.torch_internals import Store

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
        self._requests = self._open_requests()
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
        is_due = self._requests.is_due(done, self._step_s, idle=self._writer.is_idle)
        is_due |= done % self._every_steps == 0
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
        self._writer.write(state, position, limit_s)
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
            self._requests.request()

        before = signal.signal(CHECKPOINT_SIGNAL, request)
        try:
            yield
        finally:
            signal.signal(CHECKPOINT_SIGNAL, before)

    def close(self) -> None:
        """End the threads. A checkpoint that is not complete is given up."""
        self._requests.close()
        self._writer.close()

    def _open_requests(self) -> RequestedSteps:
        """Return the steps with a checkpoint beside those of `every_steps`."""
        store = self._peers.second_store()
        if store is None:
            return FirstRankRequests(None)
        others = self._context.world_size - 1
        answering = others if self._strategy.pauses_for_checkpoints else 0
        announcements = Announcements(store, answering, self._limits.collective_s)
        if not self._context.is_first:
            return AnnouncedSteps(announcements)
        return FirstRankRequests(announcements, self._strategy.steps_ahead)


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


_POLL_S = 0.5  # of the store, by a thread
_LEAD_S = 1.5  # from an announcement to its step


class RequestedSteps:
    """Base class: decides after which steps a requested checkpoint is due, the same on every rank.

    Rank 0 announces a step that is far enough ahead for the other ranks to see it. A rank that
    misses it leaves that checkpoint incomplete, and the next one counts; no rank waits for another.
    """

    def is_due(self, done: int, step_s: float, *, idle: bool) -> bool:
        """Return whether one is due after `done` steps.

        step_s: time of the step before the last one. idle: whether no checkpoint is being written.
        Called once in every step.
        """
        raise NotImplementedError

    def request(self) -> None:
        """Make a checkpoint due as soon as all ranks can write it; called by a signal handler.

        Only rank 0 does so. Other ranks get the step from it.
        """

    def close(self) -> None:
        """End threads, if there are any."""


class FirstRankRequests(RequestedSteps):
    """On rank 0, or on a single rank.

    announcements: None without other ranks. steps_ahead: returns how many steps the fastest rank is
    ahead.
    """

    def __init__(
        self, announcements: Announcements | None, steps_ahead: Callable[[], int] = lambda: 0
    ) -> None:
        self._announcements, self._steps_ahead = announcements, steps_ahead
        self._requested = False
        self._due: int | None = None

    def request(self) -> None:
        self._requested = True

    def is_due(self, done: int, step_s: float, *, idle: bool) -> bool:
        if self._due is None and idle and self._requested:
            self._requested = False
            self._due = done + self._lead(done, step_s)
            if self._announcements is not None:
                self._announcements.announce(self._due)
        if self._due != done:
            return False
        self._due = None
        if self._announcements is not None and not self._announcements.reached(done):
            self._requested = True  # try a later step
            return False
        return True

    def _lead(self, done: int, step_s: float) -> int:
        """Return the steps from now to the announced one, for which also the fastest rank needs
        `_LEAD_S`."""
        if self._announcements is None:
            return 0
        fastest = done + self._steps_ahead()
        return fastest - done + max(1, math.ceil(_LEAD_S / max(step_s, 1e-6) * fastest / done))


class AnnouncedSteps(RequestedSteps):
    """On the other ranks: after the steps that rank 0 announces; a thread looks for them."""

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements
        self._lock = threading.Lock()
        self._done = 0
        self._due: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="checkpoint requests", daemon=True)
        self._thread.start()

    def is_due(self, done: int, step_s: float, *, idle: bool) -> bool:  # noqa: ARG002
        with self._lock:
            self._done = done
            due = done in self._due
            self._due.discard(done)
        return due and self._announcements.reached(done)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * _POLL_S)

    def _poll(self) -> None:
        while not self._closed.wait(_POLL_S):
            try:
                step = self._announcements.next()
                if step is not None:
                    self._note(step)
            except RuntimeError:
                return  # the store has ended; the training notices it by itself

    def _note(self, step: int) -> None:
        with self._lock:
            in_time = self._done < step
            if in_time:
                self._due.add(step)
        self._announcements.answer(step, in_time=in_time)


_ANSWER_POLL_S = 0.01  # by a rank that has reached an announced step


class Announcements:
    """The steps that rank 0 announces, and the answers of the other ranks, in a store.

    Where all ranks have to stop at that step, a single one that misses it would keep the others
    waiting. So each rank answers, and nobody stops unless all answers are good.
    """

    def __init__(self, store: Store, answering: int = 0, limit_s: float = 0.0) -> None:
        """answering: number of ranks that answer; 0 if each may stop by itself. limit_s: of the
        wait for their answers."""
        self._store, self._answering, self._limit_s = store, answering, limit_s
        self._count = 0

    def announce(self, step: int) -> None:
        self._store.set(f"checkpoints/{self._count}", str(step))
        self._count += 1

    def next(self) -> int | None:
        """Return the next announcement; None if there is none yet."""
        key = f"checkpoints/{self._count}"
        if not self._store.check([key]):
            return None
        self._count += 1
        return int(bytes(self._store.get(key)).decode())

    def answer(self, step: int, *, in_time: bool) -> None:
        """Tell all ranks whether this one will stop at the announced step."""
        if self._answering:
            self._store.add(_answers(step, in_time=in_time), 1)

    def reached(self, step: int) -> bool:
        """Wait for all answers; return whether every rank stops at this step."""
        if not self._answering:
            return True
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline:
            good, bad = (self._store.add(_answers(step, in_time=t), 0) for t in (True, False))
            if good + bad >= self._answering:
                return bad == 0
            time.sleep(_ANSWER_POLL_S)
        return False


def _answers(step: int, *, in_time: bool) -> str:
    return f"checkpoints/{'in-time' if in_time else 'late'}/{step}"


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

    def write(self, state: RankState, position: Position, limit_s: float) -> None:
        """Copy the state, and write it in the background.

        It waits for at most `limit_s` for the checkpoint before, and is given up after that.
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
