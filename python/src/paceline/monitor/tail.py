"""New rows of a file of JSON lines that another process is writing."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

from paceline.errors import DataError
from paceline.telemetry.tail import LineTail

if TYPE_CHECKING:
    from pathlib import Path


class RowTail:
    """Continues where the last call stopped; an unfinished row waits for the next call.

    The file may appear later or be replaced; then it is read from its beginning.
    """

    def __init__(self, path: Path, *, newest: int | None = None) -> None:
        """newest: largest number of rows that a call returns, the newest ones; None returns all."""
        self._path = path
        self._newest = newest
        self._lines = LineTail(path)

    def new_rows(self) -> list[dict[str, Any]]:
        """Return complete new rows. Raises DataError if one is not a JSON object."""
        if self._lines.was_replaced():
            self._lines.rewind()
        try:
            lines = deque(self._lines.lines(to_the_end=True), maxlen=self._newest)
        except FileNotFoundError:
            return []  # moved aside just now
        return [self._row(line) for line in lines]

    def _row(self, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self._path}: expected one JSON object a line: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self._path}: expected JSON objects, got {type(row).__name__}")
        return row
