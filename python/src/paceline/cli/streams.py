"""Streams whose reader may end before the command, as in `paceline run … | head`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO


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
