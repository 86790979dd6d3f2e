"""Signals that end a command: its clean-up runs, then it exits with 128 plus the signal number."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SIGNAL_BASE = 128  # exit status of a shell for a command that a signal ended


class EndedBySignal(SystemExit):
    """Raised in the main thread when a signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(SIGNAL_BASE + number)
        self.name = signal.Signals(number).name


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise EndedBySignal for SIGTERM and SIGHUP while the context is active.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. Python delivers signals to the
    main thread only, so in any other thread this does nothing.
    """
    numbers = [signal.SIGTERM, signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = [(number, signal.signal(number, _raise)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    del frame
    raise EndedBySignal(number)
