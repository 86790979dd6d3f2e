"""Point-to-point messages of MPI, and the limit of its end after a failure."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from paceline.collectives.errors import RankFailed, timed_out
from paceline.collectives.mpi.world import poll_until
from paceline.collectives.torch_internals import untraced
from paceline.collectives.work import PendingWork

if TYPE_CHECKING:
    from paceline.collectives.work import ProgressThread


# MPI_Finalize would wait for a lost peer for ever. Paceline's own jobs call MPI_Abort after a
# failure. The following is for programs that catch the error and then end normally: Python calls
# MPI_Finalize at exit.

# Time before MPI_Finalize begins. On a busy machine torch's libraries alone take 8 s to unload.
_PYTHON_ENDS_S = 20.0

_watched: list[tuple[ProgressThread, float]] = []
_failed_limits_s: list[float] = []


def limit_end_after_failure(progress: ProgressThread, limit_s: float) -> None:
    """Limit MPI_Finalize if an operation of the thread fails. limit_s: limit of its operations."""
    if not _watched:
        atexit.register(_limit_the_end)
    _watched.append((progress, limit_s))


def note_failure(limit_s: float) -> None:
    """Record that a message did not end within `limit_s`."""
    _failed_limits_s.append(limit_s)


def _limit_the_end() -> None:
    """Limit MPI_Finalize to the limit of the operation that failed, if any failed.

    SIGALRM ends the process, because Python no longer runs during MPI_Finalize; mpirun then ends
    the other ranks.
    """
    limits_s = _failed_limits_s + [s for progress, s in _watched if progress.failure is not None]
    if limits_s:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(limits_s) + _PYTHON_ENDS_S)


_PAUSE_S = 1e-3  # for futures only: a thread that waits for a message polls far more often
_LONGEST_PAUSE_S = 4e-3
_JOIN_S = 1.0

# Buffers of sends that were given up. MPI cannot cancel a send and may still read them.
_abandoned_buffers: list[Any] = []


@untraced
class MpiMessage(PendingWork):
    """A message in flight. MPI progresses it while a waiting thread or the Messenger polls."""

    def __init__(
        self,
        name: str,
        rank: int,
        limit_s: float,
        tensors: list[Any],
        request: MPI.Request,
        buffer: Any,
        ended: Callable[[], None],
    ) -> None:
        """buffer: kept alive until the end. ended: called once after completion, by the thread that
        noticed it."""
        super().__init__(name, rank, limit_s, tensors)
        self.deadline = time.monotonic() + limit_s
        self._request = request
        self._buffer = buffer
        self._when_ended = ended
        self._status = MPI.Status()
        self._asking = threading.Lock()

    def advance(self) -> bool:
        """Poll MPI once, and return whether the message has ended."""
        if self._ended.is_set():
            return True
        if not self._asking.acquire(blocking=False):
            return False  # another thread is polling
        try:
            if not self._ended.is_set() and self._request.Test(self._status):
                self._when_ended()
                self.finish()
        except Exception as error:  # noqa: BLE001  (raised in the thread that waits for the work)
            failure = RankFailed(f"rank {self.rank}: {self.name} failed: {error}", self.rank)
            failure.__cause__ = error
            self.finish(failure)
        finally:
            self._asking.release()
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end. Raises TimedOut after `timeout`, or the error of the message.

        Without a timeout, the group's limit is counted from now, and the message is given up after
        it.
        """
        asked_s = timeout.total_seconds() if timeout is not None else 0.0
        if not asked_s:
            self.deadline = time.monotonic() + self.limit_s
        if not poll_until(self.advance, asked_s or self.limit_s):
            if asked_s:
                raise timed_out(self.name, self.rank, asked_s)
            self.give_up()
        return super().wait()

    def is_completed(self) -> bool:
        return self.advance()

    def give_up(self) -> None:
        """End the message with TimedOut; MPI no longer writes into its buffer."""
        with self._asking:
            if self._ended.is_set():
                return
            if "recv" in self.name:
                self._request.Cancel()
            _abandoned_buffers.append(self._buffer)
            note_failure(self.limit_s)
            self.finish(timed_out(self.name, self.rank, self.limit_s))

    def _source_rank(self) -> int:
        return int(self._status.Get_source())


class Messenger:
    """A thread that progresses a group's messages, so that they end although no thread waits.

    The thread starts with the first message and sleeps while there is none.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._changed = threading.Condition()
        self._under_way: list[MpiMessage] = []
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, message: MpiMessage) -> None:
        """Progress `message` from now on."""
        with self._changed:
            self._under_way.append(message)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"MPI-messages-{self._group}", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)  # no MPI call may follow MPI_Finalize
            self._changed.notify()

    def close(self) -> None:
        """Stop. Messages that have not ended progress only while a thread waits for them."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            atexit.unregister(self.close)

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while self._wait_for_messages():
            time.sleep(pause_s)
            with self._changed:
                under_way = list(self._under_way)
            ended = {id(message) for message in under_way if _moved_on(message)}
            pause_s = _PAUSE_S if ended else min(2 * pause_s, _LONGEST_PAUSE_S)
            with self._changed:
                self._under_way = [m for m in self._under_way if id(m) not in ended]
            del under_way  # no reference may keep an ended message alive

    def _wait_for_messages(self) -> bool:
        """Wait until there are messages. Return False if the messenger is to close."""
        with self._changed:
            while not self._under_way and not self._closing:
                self._changed.wait()
            return not self._closing


def _moved_on(message: MpiMessage) -> bool:
    """Return whether the message has ended, or was given up because it is late."""
    if message.advance():
        return True
    if time.monotonic() < message.deadline:
        return False
    message.give_up()
    return True
