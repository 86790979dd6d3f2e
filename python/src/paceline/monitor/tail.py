"""The new rows of a file of JSON lines that another process is writing."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

from paceline.errors import DataError
from paceline.telemetry.tail import LineTail

if TYPE_CHECKING:
    from pathlib import Path


class RowTail:
    """Reads on where it stopped; an unfinished last row waits until it is whole.

    The file may come later, or be replaced, and is then read from its beginning.
    """

    def __init__(self, path: Path, *, newest: int | None = None) -> None:
        """newest: how many rows of each look are of interest; None for all."""
        self._path = path
        self._newest = newest
        self._lines = LineTail(path)

    def new_rows(self) -> list[dict[str, Any]]:
        """Whole rows written since the last call. Raises DataError if one is not a JSON object."""
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
