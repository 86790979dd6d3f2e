"""Training progress of a rank of a finished trial, at any moment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paceline.records.rows import CommunicationRow, StepRow
from paceline.records.tables import rows
from paceline.telemetry.training import TrainingProgress, advance, advance_operation

if TYPE_CHECKING:
    from paceline.records.layout import RankFiles


class RankHistory:
    """Adds up the steps and operations of a rank in the order in which they ended.

    Raises DataError if a file is damaged.
    """

    def __init__(self, rank: int, files: RankFiles, replicas: int, *, failed: bool) -> None:
        self._replicas, self._failed = replicas, failed
        self._steps = sorted(rows(files.steps, StepRow), key=_step_ended)
        self._operations = sorted(
            rows(files.communication, CommunicationRow), key=lambda row: row.ended_unix_s
        )
        # A rank that failed is shown as failed from its last row on.
        ended = [*map(_step_ended, self._steps), *(row.ended_unix_s for row in self._operations)]
        self._last_row_unix_s = max(ended, default=0.0)
        self._steps_done = self._operations_done = 0
        self._progress = TrainingProgress(rank=rank)

    def until(self, unix_s: float) -> TrainingProgress:
        """Return the progress at `unix_s`, on the rank's own clock; times must not decrease."""
        while self._steps_done < len(self._steps):
            step = self._steps[self._steps_done]
            if _step_ended(step) > unix_s:
                break
            self._progress = advance(self._progress, step, self._replicas)
            self._steps_done += 1
        while self._operations_done < len(self._operations):
            operation = self._operations[self._operations_done]
            if operation.ended_unix_s > unix_s:
                break
            self._progress = advance_operation(self._progress, operation)
            self._operations_done += 1
        failed = self._failed and unix_s >= self._last_row_unix_s
        return dataclasses.replace(self._progress, failed=failed)


def _step_ended(row: StepRow) -> float:
    return row.started_unix_s + row.step_s
