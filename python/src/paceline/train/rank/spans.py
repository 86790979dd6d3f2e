"""Record the phases of a rank's life when they end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from paceline.collectives.recorder import Operation, Recorder, Report, reporting
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.pending import OperationNotes
from paceline.measure.records.rows import CommunicationRow, SpanName, SpanRow


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


# --- rows of the operations of this rank's process groups ----------------------------------------


@contextmanager
def recording(file: Path, notes: Path | None = None) -> Iterator[Recorder]:
    """Write every operation of this process into `file` while the context is active.

    notes: the file of the last operations, for `paceline stacks`.
    """
    noted = nullcontext() if notes is None else closing(OperationNotes(notes))
    with JsonlWriter(file) as rows, noted as used, reporting(writing_to(rows), used) as recorder:
        yield recorder


def writing_to(rows: JsonlWriter) -> Report:
    """Return a function that writes a row for each operation."""

    def write(operations: Sequence[Operation]) -> None:
        rows.write_all([CommunicationRow(**vars(operation)) for operation in operations])

    return write
