"""Training progress of a rank of a finished trial, at any moment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paceline.records.rows import CommunicationRow, StepRow
from paceline.records.tables import read_table
from paceline.telemetry.training import TrainingProgress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.records.layout import RankFiles


class RankHistory:
    """Adds up the steps and operations of a rank in the order in which they ended.

    Raises DataError if a file is damaged.
    """

    def __init__(self, rank: int, files: RankFiles, replicas: int, *, failed: bool) -> None:
        self._replicas, self._failed = replicas, failed
        steps = read_table(files.steps, StepRow)
        operations = read_table(files.communication, CommunicationRow)
        rows = [*steps.iter_rows(named=True), *operations.iter_rows(named=True)]
        self._rows = sorted(rows, key=_ended_unix_s)
        self._done = 0
        self._progress = TrainingProgress(rank=rank)

    def until(self, unix_s: float) -> TrainingProgress:
        """Return the progress at `unix_s`, on the rank's own clock; times must not decrease."""
        while self._done < len(self._rows) and _ended_unix_s(self._rows[self._done]) <= unix_s:
            row = self._rows[self._done]
            if "step_s" in row:
                self._progress.add_step(row, self._replicas)
            else:
                self._progress.add_operation(row)
            self._done += 1
        # A rank that failed is shown as failed from its last row on.
        failed = self._failed and self._done == len(self._rows)
        return dataclasses.replace(self._progress.copy(), failed=failed)


def _ended_unix_s(row: Mapping[str, Any]) -> float:
    """Return when a step or an operation ended."""
    ended: float = row["started_unix_s"] + row["step_s"] if "step_s" in row else row["ended_unix_s"]
    return ended
