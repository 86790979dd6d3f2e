"""Signals that end a command: its clean-up runs, then it exits with 128 plus the signal number.

A second signal ends the command at once, with the same exit code. What it started is then ended by
others: the kernel signals the launcher, and a cleaner kills what is left of the trial.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click

from paceline.base.host.processes import SIGNAL_BASE

# `timeout` and some shells signal a process and then its group: that is one request, not two.
_ONE_REQUEST_S = 1.0
_BLOCK_BYTES = 512  # man 2 stat
_SHOW_CURSOR = "\x1b[?25h"  # the live display hides it
# Slurm sends SIGUSR1 or SIGUSR2 before it ends a job, if the job asks for it (--signal).
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class EndedBySignal(SystemExit):
    """Raised in the main thread when a signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(SIGNAL_BASE + number)
        self.name = signal.Signals(number).name


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise EndedBySignal for signals that ask for the end, KeyboardInterrupt for SIGINT.

    An error after the signal is one of the clean-up, for example of a program that the same signal
    has ended. The signal's exception is then raised again.
    A signal that is ignored, as SIGHUP under nohup, stays ignored. Python delivers signals to the
    main thread only, so in any other thread this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [n for n in _NUMBERS if is_main and signal.getsignal(n) != signal.SIG_IGN]
    end = _EndOnce()
    before = [(number, signal.signal(number, end)) for number in numbers]
    try:
        yield
    except Exception as error:
        if end.raised is None:
            raise
        raise end.raised from error
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def continued_by(
    how: Callable[[], str], *manifests: Path, made: Path | None = None
) -> Iterator[None]:
    """Say how to continue what a signal has ended, if one of its manifests is written.

    made: folder that the command has made, whose size and removal are named, too.
    """
    try:
        yield
    except (KeyboardInterrupt, EndedBySignal) as error:
        if any(manifest.exists() for manifest in manifests):
            error.add_note(how())
            if made is not None:
                remove = f"rm -r {shlex.quote(str(made))}"
                error.add_note(f"On disk: {_used_bytes(made) / 1e6:.1f} MB. To remove it: {remove}")
        raise


def _used_bytes(folder: Path) -> int:
    """Return what the files below a folder occupy; files that vanish meanwhile do not count."""
    used = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                used += Path(place, name).lstat().st_blocks * _BLOCK_BYTES
    return used


def repeated_command() -> str:
    """Say that the same command continues what a signal has ended."""
    return f"Continue with: paceline {shlex.join(click.get_current_context().obj)}"


class _EndOnce:
    """Raises at the first signal, and ends the process at the second one."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self.raised: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            is_interrupt = number == signal.SIGINT
            self.raised = KeyboardInterrupt() if is_interrupt else EndedBySignal(number)
            raise self.raised
        if now_s - self._first_s >= _ONE_REQUEST_S:
            end_at_once(number)


def end_at_once(number: int) -> None:
    """End this process without its clean-up."""
    name = signal.Signals(number).name
    cursor = f"{_SHOW_CURSOR}\n" if sys.stderr.isatty() else ""
    text = f"{cursor}paceline: ended by a second signal, {name}, without clean-up\n"
    with suppress(OSError):  # not through Python's buffer, whose lock this thread may hold
        os.write(2, text.encode())
    os._exit(SIGNAL_BASE + number)
