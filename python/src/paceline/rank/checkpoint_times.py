"""Decide after which steps a checkpoint is written: the same ones on every rank.

A number of steps is arithmetic. Where seconds decide, rank 0 announces a step that is far enough
ahead for the other ranks to see it. A rank that misses it leaves that checkpoint incomplete, and
the next one counts; no rank ever waits for another."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.torch_internals import Store


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, from the end of a checkpoint to the start of the next.

    cost_s: time by which a checkpoint delays the training.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    root = math.sqrt(2 * cost_s * mtbf_s)
    return root * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


_POLL_S = 0.5  # of the store, by a thread
_LEAD_S = 1.5  # from an announcement to its step
_KEPT_STEPS = 64
_FIRST_MEASURED_STEPS = 8  # before the first checkpoint of every_s = "auto"
_SMALLEST_COST_S = 1e-3


class Times:
    """Base class: decides after which steps checkpoints are due."""

    interval_s: float | None = None  # the present one, where seconds decide

    def is_due(self, done: int, step_s: float, *, idle: bool) -> bool:
        """Return whether one is due after `done` steps.

        step_s: time of the step before the last one. idle: whether no checkpoint is being written.
        Called once in every step.
        """
        raise NotImplementedError

    def request(self) -> None:
        """Make a checkpoint due as soon as all ranks can write it; called by a signal handler.

        Only EverySeconds does so. Other ranks get the step from rank 0.
        """

    def close(self) -> None:
        """End threads, if there are any."""


class EverySeconds(Times):
    """On rank 0, or on a single rank: after some seconds, and on request.

    interval: None: only on request. announcements: None without other ranks. steps_ahead: returns
    how many steps the fastest rank is ahead.
    """

    def __init__(
        self,
        interval: float | DalyInterval | None,
        announcements: Announcements | None,
        steps_ahead: Callable[[], int] = lambda: 0,
    ) -> None:
        self._interval, self._announcements = interval, announcements
        self._steps_ahead = steps_ahead
        self._requested = False
        self._due: int | None = None
        self._last_s = time.monotonic()

    @property
    def interval_s(self) -> float | None:  # type: ignore[override]
        if isinstance(self._interval, DalyInterval):
            return self._interval.interval_s
        return self._interval

    def request(self) -> None:
        self._requested = True

    def is_due(self, done: int, step_s: float, *, idle: bool) -> bool:
        if isinstance(self._interval, DalyInterval):
            self._interval.add_step(step_s, idle=idle)
        if self._due is None and idle and (self._requested or self._has_passed()):
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
        self._last_s = time.monotonic()
        if isinstance(self._interval, DalyInterval):
            self._interval.begin()
        return True

    def _lead(self, done: int, step_s: float) -> int:
        """Return the steps from now to the announced one, for which also the fastest rank needs
        `_LEAD_S`."""
        if self._announcements is None:
            return 0
        fastest = done + self._steps_ahead()
        return fastest - done + max(1, math.ceil(_LEAD_S / max(step_s, 1e-6) * fastest / done))

    def _has_passed(self) -> bool:
        interval = self.interval_s
        return interval is not None and time.monotonic() - self._last_s >= interval


class AnnouncedSteps(Times):
    """On the other ranks: after the steps that rank 0 announces; a thread looks for them."""

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements
        self._lock = threading.Lock()
        self._done = 0
        self._due: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="checkpoint times", daemon=True)
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


class DalyInterval:
    """Daly's interval from the measured cost of a checkpoint: the delay of the steps meanwhile."""

    def __init__(self, mtbf_s: float) -> None:
        self._mtbf_s = mtbf_s
        self._quiet_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._delay_s = 0.0  # of the checkpoint that is being written
        self._is_written = False
        self._costs_s: deque[float] = deque(maxlen=_KEPT_STEPS)

    @property
    def interval_s(self) -> float | None:
        """The interval; 0 before the first checkpoint, None until steps have been measured."""
        if len(self._quiet_s) < _FIRST_MEASURED_STEPS:
            return None
        return daly_interval_s(self.cost_s, self._mtbf_s) if self._costs_s else 0.0

    @property
    def cost_s(self) -> float:
        """The median cost of a checkpoint so far."""
        return max(_SMALLEST_COST_S, statistics.median(self._costs_s))

    def begin(self) -> None:
        """Begin to measure a checkpoint with the next step that is added."""
        self._is_written, self._delay_s = True, 0.0

    def add_step(self, step_s: float, *, idle: bool) -> None:
        """Add a step; idle: whether no checkpoint is being written now."""
        if not self._is_written:
            self._quiet_s.append(step_s)
            return
        usual_s = statistics.median(self._quiet_s) if self._quiet_s else step_s
        self._delay_s += step_s - usual_s
        if idle:
            self._costs_s.append(max(0.0, self._delay_s))
            self._is_written = False


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
