"""A terminal that a program can write to, its screen as a person sees it, and what a view shows."""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType

_SEQUENCE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")


def shown(view: RenderableType, width: int = 80) -> str:
    """Return what a terminal without colours shows."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


class Screen:
    """Lines of text, changed by the control sequences that rich uses. Raises for any other."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0
        self.cursor_is_shown = True
        self.has_colours = False
        self._rest = ""

    def feed(self, text: str) -> None:
        """Show text; a control sequence at its end may be incomplete."""
        text, place = self._rest + text, 0
        self._rest = ""
        while place < len(text):
            if text[place] != "\x1b":
                self._show(text[place])
                place += 1
                continue
            found = _SEQUENCE.match(text, place)
            if found is None:
                self._rest = text[place:]
                assert len(self._rest) < 20, f"not a sequence: {self._rest!r}"
                return
            self._control(*found.groups())
            place = found.end()

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    def _show(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self.column = 0
        else:
            if self.column == self.columns:
                self.column = 0
                self._down()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _control(self, private: str, number: str, letter: str) -> None:
        if private and number == "25":
            self.cursor_is_shown = letter == "h"
        elif letter == "A":
            self.row = max(0, self.row - int(number or 1))
        elif letter == "K":
            assert number == "2"
            self.lines[self.row] = ""
        elif letter == "m":
            self.has_colours |= any(30 <= int(n or 0) <= 49 for n in number.split(";"))
        else:
            raise AssertionError(f"unknown sequence: {private}{number}{letter}")


class Program:
    """A program whose standard streams are a terminal of its own."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], cwd: Path, columns: int
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.screen = Screen(columns)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *argv],
            stdin=theirs, stdout=theirs, stderr=theirs, env=dict(environment), cwd=cwd,
        )  # fmt: skip
        os.close(theirs)
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, condition: Callable[[str], bool], limit_s: float) -> None:
        """Read until the screen meets the condition; fail if the program ends before or is late."""
        self._read(lambda: condition(self.screen.text), limit_s)
        assert condition(self.screen.text), self.screen.text

    def end(self, limit_s: float) -> int:
        """Read until the program has closed the terminal; return its exit code."""
        self._read(lambda: False, limit_s)
        return self.process.wait(timeout=limit_s)

    def close(self) -> None:
        """End the program if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10)
        os.close(self._ours)

    def _read(self, is_enough: Callable[[], bool], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not is_enough():
            left_s = max(0.0, deadline_s - time.monotonic())
            assert select.select([self._ours], [], [], left_s)[0], f"late:\n{self.screen.text}"
            try:
                found = os.read(self._ours, 65536)
            except OSError:  # EIO: no process has the terminal open any more
                return
            self.screen.feed(self._decode(found))
