"""Record what a rank does: the phases of its life when they end, operations of its groups."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from paceline.collectives.recorder import Operation, Recorder, Report, reporting
from paceline.measure.records.communication import LastOperation, OperationNotes, last_operations
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
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


_UNANSWERED_S = 5.0  # a rank may be about to notice that others have left


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


@dataclass(frozen=True, slots=True)
class _Unanswered:
    operation: LastOperation
    since_s: float  # on the clock of time.monotonic


class UnansweredOperations:
    """Finds operations of other ranks that this rank, which has ended, will never begin.

    It reads the files of the ranks: those of this host, or all in a shared run directory.
    """

    def __init__(self, files: TrialFiles, rank: int, ranks: int) -> None:
        self._files, self._rank = files, rank
        self._others = [each for each in range(ranks) if each != rank]
        self._seen: dict[int, _Unanswered] = {}

    def find(self) -> tuple[int, LastOperation] | None:
        """Return a rank that has waited for some seconds, and its operation."""
        own = {e.group: e.sequence for e in last_operations(self._of(self._rank))}
        for rank in self._others:
            waiting = (
                each
                for each in last_operations(self._of(rank))
                if each.pending and each.sequence > own.get(each.group, each.sequence)
            )
            now = next(waiting, None)
            before = self._seen.pop(rank, None)
            if now is None:
                continue
            is_same = before is not None and before.operation == now
            since_s = before.since_s if before is not None and is_same else time.monotonic()
            if time.monotonic() - since_s > _UNANSWERED_S:
                return rank, now
            self._seen[rank] = _Unanswered(now, since_s)
        return None

    def _of(self, rank: int) -> Path:
        return self._files.rank(rank).operations
