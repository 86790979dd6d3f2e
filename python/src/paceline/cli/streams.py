"""Streams whose reader may end before the command, as in `paceline run … | head`, that are closed
from the start, or whose encoding lacks some of our characters."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

# What stands for a character that an encoding lacks, as ASCII and ISO-8859-1 do.
_PLAIN = {
    "…": "...", "·": "-", "≈": "~", "×": "x", "±": "+-", "µ": "u", "–": "-", "−": "-",  # noqa: RUF001
    "→": "->", "≤": "<=", "≥": ">=", "█": "#", "─": "-", "│": "|", "✓": "ok", "✗": "x",
}  # fmt: skip
_IN_PLAIN_WORDS = "paceline-plain"


def make_streams_usable() -> None:
    """Let standard output and error take every text, in each locale, also where they are closed."""
    codecs.register_error(_IN_PLAIN_WORDS, _in_plain_words)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`: the descriptor was closed when Python started
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
        ):
            stream.reconfigure(errors=_IN_PLAIN_WORDS)


def _in_plain_words(error: UnicodeError) -> tuple[bytes, int]:
    """Write what an encoding lacks in ASCII: a character without a known form as its number, and
    unchanged the bytes of a path that are not text."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return b"".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":  # os.fsdecode
        return bytes([ord(character) - 0xDC00])
    return _PLAIN.get(character, character).encode("ascii", "backslashreplace")


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
