"""Output of commands: JSON, Markdown, plain consoles, closed readers, and the end by a signal.

Rich reads `[name]` as markup and `:name:` as an emoji. Paths, spec keys and messages of other
programs contain both, so markup is off and styles are given as arguments.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from paceline.base.host.processes import SIGNAL_BASE
from paceline.measure.records.files import json_text
from paceline.measure.records.rows import SCHEMA


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document for other programs, after its schema.

    Dataclasses become objects, and numbers that JSON does not have become null.
    """
    print(json_text({"schema": SCHEMA, **document}))


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or standard error without markup."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def markdown(view: RenderableType) -> str:
    """Return groups, texts and tables as paragraphs and tables of Markdown."""
    return "\n\n".join(block for block in _blocks(view) if block)


def _blocks(view: RenderableType) -> Iterator[str]:
    if isinstance(view, Group):
        for each in view.renderables:
            yield from _blocks(each)
    elif isinstance(view, Padding):
        yield from _blocks(view.renderable)
    elif isinstance(view, Table):
        if view.title:
            yield f"**{_plain(view.title)}**"
        yield _table(view)
    else:
        yield _plain(view)


def _table(table: Table) -> str:
    headers = [_cell(column.header) for column in table.columns]
    rules = ["---:" if column.justify == "right" else "---" for column in table.columns]
    columns = [[_cell(cell) for cell in column.cells] for column in table.columns]
    lines = [headers, rules, *zip(*columns, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: RenderableType) -> str:
    words = _plain(cell).replace("-\n", "").replace("|", "\\|")
    return " ".join(words.split())


def _plain(view: RenderableType) -> str:
    return str(view)  # of a rich Text: without its styles


# Signals that end a command: its clean-up runs, then it exits with 128 plus the signal number
#
# A second signal ends the command at once, with the same exit code. What it started is then ended
# by others: the kernel signals the launcher, and a cleaner kills what is left of the trial.

# `timeout` and some shells signal a process and then its group: that is one request, not two.
_ONE_REQUEST_S = 1.0
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
def continued_by(how: Callable[[], str], *manifests: Path) -> Iterator[None]:
    """Say how to continue what a signal has ended, if one of its manifests is written."""
    try:
        yield
    except (KeyboardInterrupt, EndedBySignal) as error:
        if any(manifest.exists() for manifest in manifests):
            error.add_note(how())
        raise


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


# --- streams whose reader may end before the command, as in `paceline run … | head` --------------


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
