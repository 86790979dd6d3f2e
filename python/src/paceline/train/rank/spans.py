"""Record the phases of a rank's life when they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.rows import SpanName, SpanRow


class Spans(JsonlWriter):
    """Appends a SpanRow for each phase, also for one that ends with an error.

    The times follow a steady clock: no phase ends before its begin when the wall clock is set back.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._unix_offset_s = time.time() - time.monotonic()

    def ended(self, name: SpanName, started_unix_s: float) -> None:
        """Record a phase that began at `started_unix_s` and ends now."""
        self.record(name, started_unix_s, self._unix_s())

    def record(self, name: SpanName, started_unix_s: float, ended_unix_s: float) -> None:
        """Record a phase that has ended."""
        self.write(SpanRow(name=name, started_unix_s=started_unix_s, ended_unix_s=ended_unix_s))

    @contextmanager
    def __call__(self, name: SpanName) -> Iterator[None]:
        started_unix_s = self._unix_s()
        try:
            yield
        finally:
            self.ended(name, started_unix_s)

    def _unix_s(self) -> float:
        return self._unix_offset_s + time.monotonic()
