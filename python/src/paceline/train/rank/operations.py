"""Rows of the operations of this rank's process groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from paceline.collectives.recorder import Operation, Recorder, Report, reporting
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.pending import OperationNotes
from paceline.measure.records.rows import CommunicationRow


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
