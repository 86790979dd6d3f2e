"""How far a rank of a finished trial had come at any moment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paceline.records.rows import CommunicationRow, StepRow
from paceline.records.tables import rows
from paceline.telemetry.progress import advance, advance_operation
from paceline.telemetry.ticks import TrainingProgress

if TYPE_CHECKING:
    from paceline.analysis.reading import RankRecord
    from paceline.records.layout import RankFiles


class RankHistory:
    """Adds a rank's steps and operations up in the order in which they ended; asked for later and
    later moments."""

    def __init__(self, record: RankRecord, files: RankFiles, replicas: int) -> None:
        self._replicas = replicas
        self._failed = record.status is not None and record.status.state == "failed"
        self._steps = sorted(rows(files.steps, StepRow), key=_step_ended)
        self._operations = sorted(
            rows(files.communication, CommunicationRow), key=lambda row: row.ended_unix_s
        )
        # failed ranks fail at the end: from their last sign of life on
        ended = [*map(_step_ended, self._steps), *(row.ended_unix_s for row in self._operations)]
        self._last_sign_unix_s = max(ended, default=0.0)
        self._steps_done = self._operations_done = 0
        self._progress = TrainingProgress(rank=record.rank)

    def until(self, unix_s: float) -> TrainingProgress:
        """Progress at `unix_s`, on the rank's own clock."""
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
        failed = self._failed and unix_s >= self._last_sign_unix_s
        if failed != self._progress.failed:
            self._progress = dataclasses.replace(self._progress, failed=failed)
        return self._progress


def _step_ended(row: StepRow) -> float:
    return row.started_unix_s + row.step_s
