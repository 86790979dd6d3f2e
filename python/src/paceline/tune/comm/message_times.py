"""Times of collectives by message size: default against best.

Like table I of Anthony et al. (Efficient Training of Semantic Image Segmentation on Summit using
Horovod and MVAPICH2-GDR, 2020; measured with their hvprof), but counted from the start of the last
rank, so that a late rank does not count as time of the transport.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from paceline.analysis.communication import size_bin
from paceline.analysis.operations import clock_errors, load_operations, operation_times
from paceline.analysis.reading import load_trial
from paceline.analysis.steps import read_steps
from paceline.plan.planning import repeated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.reading import TrialRecord
    from paceline.plan.trial import Trial
    from paceline.records.layout import RunFiles
    from paceline.tune.findings import Finding

# Names of the ranges of `size_bin`, as in the paper's table.
BIN_NAMES = ("0-10^5", "10^5-10^6", "10^6-10^7", "10^7-10^8", ">10^8")


@dataclass(frozen=True, slots=True, kw_only=True)
class BinTimes:
    """Seconds per step of one size range, or of all; None if there was no such message."""

    name: str
    default_s: float | None
    best_s: float | None

    @property
    def improvement_percent(self) -> float | None:
        """Percentage of the default's time that the best saves."""
        if not self.default_s or self.best_s is None:
            return None
        return 100 * (1 - self.best_s / self.default_s)

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes": self.name,
            "default_s": self.default_s,
            "best_s": self.best_s,
            "improvement_percent": self.improvement_percent,
        }


def compare_messages(finding: Finding, files: RunFiles) -> tuple[BinTimes, ...]:
    """Return the size ranges and their total, for the repeats in which default and fastest were
    compared.

    Empty if the transport records no operations, or one of the two was not measured.
    """
    if finding.default is None or finding.fastest is None:
        return ()
    default = _median_times(finding.default, finding.repeats, files)
    best = _median_times(finding.fastest, finding.repeats, files)
    if default is None or best is None:
        return ()
    bins = [
        BinTimes(name=name, default_s=default[number], best_s=best[number])
        for number, name in enumerate(BIN_NAMES)
    ]
    return (*bins, BinTimes(name="total", default_s=_sum(default), best_s=_sum(best)))


def bin_times(record: TrialRecord) -> tuple[float | None, ...] | None:
    """Return seconds per step of transfer by size range: steady steps, mean over ranks.

    The transfer of an operation on a rank lasts from the start of the last rank to its own end.
    None if no operation was recorded in a steady step.
    """
    operations = load_operations(record)
    times = operation_times(read_steps(record), operations, clock_errors(record, operations))
    steady = times.filter(pl.col("step") >= record.trial.training.warmup_steps)
    chosen = steady.filter(pl.col("payload_bytes") > 0, pl.col("transfer_s").is_not_null())
    if chosen.is_empty():
        return None
    sums = chosen.group_by(size_bin(pl.col("payload_bytes"))).agg(pl.col("transfer_s").sum())
    sums_s = dict(sums.iter_rows())
    share = steady["step"].n_unique() * len(record.ranks)
    return tuple(sums_s[size] / share if size in sums_s else None for size in range(len(BIN_NAMES)))


def _median_times(
    trial: Trial, repeats: Sequence[int], files: RunFiles
) -> tuple[float | None, ...] | None:
    """Return the median over repeats for each size range."""
    measured = [bin_times(load_trial(files.trial(repeated(trial, r).id))) for r in repeats]
    known = [times for times in measured if times is not None]
    if not known:
        return None
    return tuple(_median(column) for column in zip(*known, strict=True))


def _median(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return statistics.median(known) if known else None


def _sum(times: Sequence[float | None]) -> float:
    return sum(time for time in times if time is not None)
