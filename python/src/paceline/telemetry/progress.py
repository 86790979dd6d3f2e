"""How far training has come, from the files that ranks write anyway: it costs training nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from bisect import bisect_left
from typing import TYPE_CHECKING

from paceline.errors import DataError
from paceline.records.files import fields_of, read_json
from paceline.telemetry.catalogue import PHASES, STEP_SECONDS_BUCKETS
from paceline.telemetry.tail import LineTail
from paceline.telemetry.ticks import OperationTotals, TrainingProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any

    from paceline.records.layout import RankFiles
    from paceline.records.rows import CommunicationRow, StepRow
    from paceline.telemetry.rank_finder import RankFinder

_PHASE_KEYS = tuple((phase, f"{phase}_s") for phase in PHASES)
_log = logging.getLogger("paceline.sidecar")


def advance(progress: TrainingProgress, row: StepRow, replicas: int = 1) -> TrainingProgress:
    """`progress` and one step more; the argument stays as it is.

    replicas: of the whole trial. Needed in pipelines, where the stage that has the loss has no
    images of its own: it is taken to have an equal share of the global batch.
    """
    further = _copy_of(progress)
    _add_step(further, fields_of(row), replicas)
    return further


def advance_operation(progress: TrainingProgress, row: CommunicationRow) -> TrainingProgress:
    """`progress` and one operation more; the argument stays as it is."""
    further = _copy_of(progress)
    _add_operation(further, fields_of(row))
    return further


def _copy_of(progress: TrainingProgress) -> TrainingProgress:
    return dataclasses.replace(
        progress,
        step_counts=list(progress.step_counts),
        operations=dict(progress.operations),
    )


def _add_step(progress: TrainingProgress, row: Mapping[str, Any], replicas: int) -> None:
    """In place, and not at all if the row holds what cannot be added, or lacks it.

    row: the fields of a StepRow. Making one first would be half of what following many ranks takes.
    """
    loss, epoch = _mean_loss(row, replicas), row["epoch"]
    step_s: float = row["step_s"]
    images, step_s_sum = progress.images + row["samples"], progress.step_s_sum + step_s
    # a counter never falls; other_s may round below 0
    phase_s = {
        name: s + max(0.0, row.get(key) or 0.0)
        for (name, key), s in zip(_PHASE_KEYS, progress.phase_s.values(), strict=True)
    }
    bucket = bisect_left(STEP_SECONDS_BUCKETS, step_s)
    ended_unix_s = row["started_unix_s"] + step_s
    last_unix_s = progress.last_step_ended_unix_s
    progress.last_step_ended_unix_s = max(ended_unix_s, last_unix_s or ended_unix_s)
    progress.steps += 1
    progress.images, progress.step_s_sum, progress.phase_s = images, step_s_sum, phase_s
    progress.epoch = epoch
    progress.loss = progress.loss if loss is None else loss
    progress.step_counts[bucket] += 1


def _add_operation(progress: TrainingProgress, row: Mapping[str, Any]) -> None:
    """As _add_step, of a CommunicationRow."""
    totals = progress.operations.get(row["operation"], OperationTotals())
    sent_bytes = totals.sent_bytes
    if row["sent_bytes"] is not None:
        sent_bytes = (sent_bytes or 0) + row["sent_bytes"]
    progress.operations[row["operation"]] = OperationTotals(
        operations=totals.operations + 1,
        payload_bytes=totals.payload_bytes + row["payload_bytes"],
        sent_bytes=sent_bytes,
        seconds=totals.seconds + max(0.0, row["ended_unix_s"] - row["arrived_unix_s"]),
    )


def _mean_loss(row: Mapping[str, Any], replicas: int) -> float | None:
    is_stage = row.get("bubble_s") is not None
    loss_sum: float = row["loss_sum"]
    samples: int = row["samples"]
    global_samples: int = row["global_samples"]
    if is_stage and loss_sum == 0.0:
        return None  # a pipeline's last stage has the loss, this is another
    if samples > 0:
        return loss_sum / samples
    if is_stage and global_samples > 0:
        return loss_sum * replicas / global_samples
    return None


class TrainingTail:
    """Follows the ranks of one trial on one host, by what they add to their files.

    A file that is replaced starts its rank again from nothing. Rows that cannot be read are left
    out and told once; a rank whose files cannot be read stays as it was. May be asked by several
    threads.
    """

    def __init__(self, finder: RankFinder) -> None:
        """finder: knows the ranks of the trial that are on this host; asks for itself alone."""
        self._finder = finder
        self._lock = threading.Lock()
        self._ranks: dict[int, _RankTail] = {}

    def read(self, *, to_the_end: bool = False) -> tuple[TrainingProgress, ...]:
        """Progress of the ranks that were last on this host, in order.

        Takes up to 1 MiB of new rows of each file, or all of them (`to_the_end`: at the last).
        """
        with self._lock:
            return tuple(
                self._tail(rank).read(failed=status.state == "failed", to_the_end=to_the_end)
                for rank, status in sorted(self._finder.statuses().items())
            )

    def _tail(self, rank: int) -> _RankTail:
        if rank not in self._ranks:
            files = self._finder.files
            self._ranks[rank] = _RankTail(rank, files.rank(rank), _replicas(files.trial))
        return self._ranks[rank]


class _RankTail:
    def __init__(self, rank: int, files: RankFiles, replicas: int) -> None:
        self._rank = rank
        self._replicas = replicas
        self._steps = LineTail(files.steps)
        self._operations = LineTail(files.communication)
        self._progress = TrainingProgress(rank=rank)
        self._warned = False

    def read(self, *, failed: bool, to_the_end: bool) -> TrainingProgress:
        if any([self._steps.was_replaced(), self._operations.was_replaced()]):  # look at both
            self._steps.rewind()
            self._operations.rewind()
            self._progress = TrainingProgress(rank=self._rank)
        self._take(self._steps, self._step, to_the_end=to_the_end)
        self._take(self._operations, _add_operation, to_the_end=to_the_end)
        if failed != self._progress.failed:
            self._progress = dataclasses.replace(self._progress, failed=failed)
        return self._progress

    def _step(self, progress: TrainingProgress, row: Mapping[str, Any]) -> None:
        _add_step(progress, row, self._replicas)

    def _take(
        self,
        tail: LineTail,
        add: Callable[[TrainingProgress, Mapping[str, Any]], None],
        *,
        to_the_end: bool,
    ) -> None:
        further: TrainingProgress | None = None  # who was told the last must not see it change
        try:
            for line in tail.lines(to_the_end=to_the_end):
                further = further or _copy_of(self._progress)
                try:
                    add(further, json.loads(line))
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    self._warn(f"{tail.path}: a row is left out: {error!r}")
        except OSError as error:
            self._warn(f"{tail.path}: {error}")
        self._progress = further or self._progress

    def _warn(self, what: str) -> None:
        if not self._warned:
            _log.warning("rank %d: its progress is not fully known: %s", self._rank, what)
        self._warned = True


def _replicas(trial_file: Path) -> int:
    """Copies of the model in a trial, as plan.trial counts them; 1 if the file does not say.

    By hand: the classes of the plan would double the sidecar's memory.
    """
    try:
        trial = read_json(trial_file)
        placement, pipeline = trial["placement"], trial.get("pipeline")
        stages = pipeline["stages"] if pipeline else 1
        ranks = placement["nodes"] * placement["ranks_per_node"]
        return int(ranks // stages * trial.get("thread_replicas", 1))
    except (OSError, DataError, KeyError, TypeError, ZeroDivisionError):
        return 1
