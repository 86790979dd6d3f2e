"""Processes by a name that lasts: a number alone may name another process a moment later."""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.telemetry.procfs import ProcFs

if TYPE_CHECKING:
    from types import TracebackType

_PROCFS = ProcFs()
_POLL_S = 0.2


def boot_id() -> str:
    """Which start of the machine this is; process numbers and ticks mean nothing in another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this host since its start."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this number now; None if none has, or it has ended."""
        try:
            stat = _PROCFS.stat(pid)
        except OSError:
            return None
        return None if stat is None or stat.ended else cls(pid, stat.start_ticks)

    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self


class Peer:
    """A hold on a process: signals reach it or nobody. Where the kernel has no pidfd_open(2)
    (before 5.3), it is asked for from time to time instead."""

    def __init__(self, process: ProcessId) -> None:
        self.process = process
        self._descriptor: int | None = None
        try:
            self._descriptor = os.pidfd_open(process.pid)
        except OSError:
            return  # gone, or no such call: is_alive tells
        if not process.is_alive():  # the number was another's by then
            self.close()

    def wait(self, limit_s: float, also: int | None = None) -> bool:
        """Wait for its end, `limit_s` at most, or until the descriptor `also` can be read; whether
        it has ended."""
        poll = select.poll()
        for descriptor in (self._descriptor, also):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        deadline_s = time.monotonic() + limit_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            if self._descriptor is None:
                if not self.process.is_alive():
                    return True
                left_s = min(left_s, _POLL_S)
            ready = {descriptor for descriptor, _ in poll.poll(left_s * 1000)}
            if self._descriptor in ready:
                return True
            if ready or time.monotonic() >= deadline_s:
                return False

    def send(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended. Raises PermissionError."""
        try:
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif self.process.is_alive():
                os.kill(self.process.pid, number)
        except ProcessLookupError:
            return

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
