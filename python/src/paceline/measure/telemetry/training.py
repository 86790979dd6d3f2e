"""Training progress of each rank, read from the rows that the ranks write. It costs training
nothing."""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.measure.records.files import LineTail, fields_of
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.measure.records.metrics.metric import Row
from paceline.measure.records.phases import RANK_STEP_PHASES
from paceline.measure.records.rows import RankStatus

STEP_SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# phase -> fields of StepRow
_PHASE_KEYS = {
    phase: ("comm_s", "pass_comm_s") if phase == "comm" else (f"{phase}_s",)
    for phase in RANK_STEP_PHASES
}
_log = logging.getLogger("paceline.sidecar")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values counted by bucket, not cumulative; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds
    total: float  # sum of all values


@dataclass(slots=True, kw_only=True)
class OperationTotals:
    """Sums over one kind of operation of a rank's process groups."""

    operations: int = 0
    payload_bytes: int = 0
    sent_bytes: int | None = None  # None where the transport does not count
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class TrainingProgress:
    """Sums over the steps of one rank so far."""

    steps: int = 0
    samples: int = 0
    epoch: int | None = None  # of the last step; None before the first
    loss: float | None = None  # mean over the rank's samples in the last step that has any
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RANK_STEP_PHASES, 0.0))
    step_s_sum: float = 0.0
    # number of steps in each bucket of STEP_SECONDS_BUCKETS, not cumulative
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_SECONDS_BUCKETS) + 1))
    last_step_ended_unix_s: float | None = None
    operations: dict[str, OperationTotals] = field(default_factory=dict)
    failed: bool = False

    def row(self) -> Row:
        """Return the values of the training metrics by column; later steps do not change them."""
        steps = Distribution(STEP_SECONDS_BUCKETS, tuple(self.step_counts), self.step_s_sum)
        return {
            "rank_failed": int(self.failed),
            "training_steps": self.steps,
            "training_samples": self.samples,
            "training_epoch": self.epoch,
            "training_loss": self.loss,
            "training_last_step_timestamp_seconds": self.last_step_ended_unix_s,
            "phases": dict(self.phase_s),
            "training_step_seconds": steps,
            "operations": {name: fields_of(totals) for name, totals in self.operations.items()},
        }

    def add_step(self, row: Mapping[str, Any], replicas: int = 1) -> None:
        """Add the fields of a StepRow. Raises before any change if a field is missing or wrong.

        replicas: model replicas of the whole trial. In a pipeline, the stage that has the loss has
            no samples of its own: an equal share of the global batch is assumed.
        """
        loss, epoch = _mean_loss(row, replicas), row["epoch"]
        step_s: float = row["step_s"]
        samples, step_s_sum = self.samples + (row["samples"] or 0), self.step_s_sum + step_s
        # A counter must not decrease; rounding can make other_s negative.
        phase_s = {
            name: self.phase_s[name] + sum(max(0.0, row.get(key) or 0.0) for key in keys)
            for name, keys in _PHASE_KEYS.items()
        }
        ended_unix_s = row["started_unix_s"] + step_s
        last_unix_s = self.last_step_ended_unix_s
        self.last_step_ended_unix_s = max(ended_unix_s, last_unix_s or ended_unix_s)
        self.steps += 1
        self.samples, self.step_s_sum, self.phase_s = samples, step_s_sum, phase_s
        self.epoch = epoch
        self.loss = self.loss if loss is None else loss
        self.step_counts[bisect_left(STEP_SECONDS_BUCKETS, step_s)] += 1

    def add_operation(self, row: Mapping[str, Any]) -> None:
        """Add the fields of a CommunicationRow. Raises like `add_step`."""
        totals = self.operations.get(row["operation"], OperationTotals())
        sent_bytes = totals.sent_bytes
        if row["sent_bytes"] is not None:
            sent_bytes = (sent_bytes or 0) + row["sent_bytes"]
        self.operations[row["operation"]] = OperationTotals(
            operations=totals.operations + 1,
            payload_bytes=totals.payload_bytes + row["payload_bytes"],
            sent_bytes=sent_bytes,
            seconds=totals.seconds + max(0.0, row["ended_unix_s"] - row["arrived_unix_s"]),
        )


def _mean_loss(row: Mapping[str, Any], replicas: int) -> float | None:
    is_stage = row.get("bubble_s") is not None
    loss_sum: float | None = row["loss_sum"]
    samples: int | None = row["samples"]
    if samples is None or loss_sum is None:
        return loss_sum  # of a script that reports no samples
    global_samples: int = row["global_samples"] or 0
    if is_stage and loss_sum == 0.0:
        return None  # only the last stage of a pipeline has the loss
    if samples > 0:
        return loss_sum / samples
    if is_stage and global_samples > 0:
        return loss_sum * replicas / global_samples
    return None


class TrainingTail:
    """Follows the step rows and communication rows of the ranks on one host.

    A file that was replaced starts its rank from zero. Unreadable rows are skipped and reported
    once.
    """

    def __init__(self, files: TrialFiles, replicas: int = 1) -> None:
        """replicas: model replicas of the whole trial."""
        self._files, self._replicas = files, replicas
        self._ranks: dict[int, _RankTail] = {}

    def read(
        self, statuses: Mapping[int, RankStatus], *, to_the_end: bool = False
    ) -> dict[int, TrainingProgress]:
        """Return the progress of each of these ranks; the next call changes the same objects.

        Reads up to 1 MiB of new rows of each file, or all of them (`to_the_end`).
        """
        for rank in statuses.keys() - self._ranks.keys():
            self._ranks[rank] = _RankTail(self._files.rank(rank), self._replicas)
        found = {rank: self._ranks[rank].read(to_the_end=to_the_end) for rank in statuses}
        for rank, status in statuses.items():
            found[rank].failed = status.state == "failed"
        return found


class _RankTail:
    def __init__(self, files: RankFiles, replicas: int) -> None:
        self._replicas = replicas
        self._steps = LineTail(files.steps)
        self._operations = LineTail(files.communication)
        self._progress = TrainingProgress()
        self._warned = False

    def read(self, *, to_the_end: bool) -> TrainingProgress:
        if any([self._steps.was_replaced(), self._operations.was_replaced()]):  # check both
            self._steps.rewind()
            self._operations.rewind()
            self._progress = TrainingProgress()
        progress = self._progress
        self._take(self._steps, lambda row: progress.add_step(row, self._replicas), to_the_end)
        self._take(self._operations, progress.add_operation, to_the_end)
        return progress

    def _take(
        self, tail: LineTail, add: Callable[[Mapping[str, Any]], None], to_the_end: bool
    ) -> None:
        try:
            for line in tail.lines(to_the_end=to_the_end):
                try:
                    add(json.loads(line))
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    self._warn(f"{tail.path}: a row is skipped: {error!r}")
        except OSError as error:
            self._warn(f"{tail.path}: {error}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            _log.warning("the progress of a rank is incomplete: %s", what)
        self._warned = True
