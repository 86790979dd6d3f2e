"""Streams and signals of a command.

The reader of a stream may end before the command, as in `paceline run … | head`; a stream may be
closed from the start, or its encoding lacks some of our characters.

After a signal a command cleans up and exits with 128 plus the number of the signal. A second signal
ends it at once, with the same exit code. What it started is then ended by others: the kernel
signals the launcher, and a cleaner kills what is left of the trial.
"""

from __future__ import annotations

import codecs
import io
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
from typing import Any, Literal, TextIO

import click

from paceline.base.host.processes import SIGNAL_BASE

# What stands for a character that an encoding lacks, as ASCII and ISO-8859-1 do.
_PLAIN = {
    "…": "...", "·": "-", "≈": "~", "×": "x", "±": "+-", "µ": "u", "–": "-", "−": "-",  # noqa: RUF001
    "→": "->", "≤": "<=", "≥": ">=", "█": "#", "─": "-", "│": "|", "✓": "ok", "✗": "x",
}  # fmt: skip
IN_PLAIN_WORDS = "paceline-plain"  # name of the error handler of encoders
_STDERR = 2


def make_streams_usable() -> None:
    """Let standard output and error take every text, in each locale, also where they are closed."""
    _open_standard_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`: the descriptor was closed when Python started
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
        ):
            stream.reconfigure(errors=IN_PLAIN_WORDS)
            if codecs.lookup(stream.encoding).name == "ascii":
                setattr(sys, name, _PlainStream(stream))


def _open_standard_descriptors() -> None:
    """Give closed ones of the first three descriptors to /dev/null. Otherwise a file that is opened
    later gets their number, and with it what libraries and other programs print."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(opened, True)
    os.close(opened)


def _in_plain_words(error: UnicodeError) -> tuple[bytes, int]:
    """Write what an encoding lacks in ASCII: a character without a known form as its number, and
    unchanged the bytes of a path that are not text."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return b"".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":  # os.fsdecode
        return bytes([ord(character) - 0xDC00])
    return _PLAIN.get(character, character).encode("ascii", "backslashreplace")


codecs.register_error(IN_PLAIN_WORDS, _in_plain_words)


@contextmanager
def reader_may_end(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Discard what is written to the stream after its pipe or terminal has been closed.

    A run must not end because nobody reads its progress any more.
    """
    before: TextIO | None = getattr(sys, name)
    if before is None:  # the descriptor was closed when Python started
        yield
        return
    setattr(sys, name, _Lossy(before))
    try:
        yield
    finally:
        getattr(sys, name).flush()
        setattr(sys, name, before)


class _PlainStream:
    """A stream of ASCII that takes every text. It does not call itself ASCII, because click would
    then write UTF-8 into it."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Lossy:
    """A text stream that never raises an error of the operating system."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._discard_all()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._discard_all()

    def _discard_all(self) -> None:
        # The stream keeps text that it could not write, and would try again when Python exits.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


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
