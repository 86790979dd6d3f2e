"""Time accounting: from the launch command to its exit, per rank, adding up to the whole.

`other` is the time that no other phase claims: rendezvous, building the model, writing results, and
the rest of a step. Therefore the phases of a rank always add up to the wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from paceline.analysis.trial.reading import RankRecord, TrialRecord
from paceline.analysis.trial.steps import RankSteps
from paceline.measure.records.phases import OTHER_SPANS, PHASES, STEP_PHASES, Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPhases:
    """One rank's time in seconds.

    whole: by PHASES, adding up to `wall_s`; None where there is nothing to measure (communication
    without peers, the bubble without a pipeline, launch where the process's start is unknown).
    step: by STEP_PHASES, mean over the steady steps, adding up to the mean step.
    other_parts: the known parts of `other`.
    """

    rank: int
    host: str | None
    wall_s: float
    whole: Phases
    step: Phases
    other_parts: Phases


def trial_phases(record: TrialRecord, steps: RankSteps) -> list[RankPhases]:
    """Compute every rank's time; empty if the trial has no outcome (its end is unknown)."""
    if record.outcome is None:
        return []
    launched, ended = record.outcome.launched_unix_s, record.outcome.ended_unix_s
    sums = _by_rank(steps, mean=False)
    means = mean_steps(steps.steady())
    return [_rank_phases(r, launched, ended, sums, means) for r in record.ranks]


def mean_steps(steps: RankSteps) -> dict[int, Phases]:
    """Return each rank's mean step by STEP_PHASES. Ranks without a step are left out."""
    return _by_rank(steps, mean=True)


def mean_step(means: Mapping[int, Phases], rank: int) -> Phases:
    """Return a rank's mean step; all None if it has none."""
    return means.get(rank) or dict.fromkeys(STEP_PHASES)


def mean_of_each(rows: Sequence[Mapping[str, float | None]]) -> Phases:
    """Return each name's mean; None where no row has it."""
    return _reduced(rows, fmean)


def median_of_each(rows: Sequence[Mapping[str, float | None]]) -> Phases:
    """Return each name's median; None where no row has it."""
    return _reduced(rows, median)


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _by_rank(steps: RankSteps, *, mean: bool) -> dict[int, Phases]:
    """Add up or average each phase over the steps of each rank; None where no step has it.

    A phase that only some steps have (communication every few steps) counts as 0 in the others.
    """
    seconds = np.stack([steps[f"{name}_s"] for name in STEP_PHASES], axis=1)
    is_known = ~np.isnan(seconds)  # shape (ranks, phases, steps)
    sums = np.where(is_known, seconds, 0.0).sum(axis=2)
    counts = steps.is_finished.sum(axis=1)
    values = sums / np.maximum(counts, 1)[:, None] if mean else sums
    values[~is_known.any(axis=2)] = np.nan
    return {
        rank: {
            name: None if np.isnan(value) else value
            for name, value in zip(STEP_PHASES, row, strict=True)
        }
        for rank, row, count in zip(steps.ranks, values.tolist(), counts, strict=True)
        if count
    }


def _reduced(
    rows: Sequence[Mapping[str, float | None]], reduce: Callable[[list[float]], float]
) -> Phases:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [v for row in rows if (v := row.get(name)) is not None] for name in names}
    return {name: reduce(found) if found else None for name, found in values.items()}


def _rank_phases(
    rank: RankRecord,
    launched: float,
    ended: float,
    sums: Mapping[int, Phases],
    means: Mapping[int, Phases],
) -> RankPhases:
    offset = rank.clock_offset_s
    started = _process_start(rank)
    last = max((s.ended_unix_s for s in rank.spans), default=None)
    in_steps = {n: v for n, v in mean_step(sums, rank.rank).items() if n != "other"}
    whole: Phases = {
        # the launcher's clock is assumed to be rank 0's
        "launch": None if started is None else max(0.0, started + offset - launched),
        "imports": _span_s(rank, "imports"),
        "data_load": _span_s(rank, "data_load"),
        **in_steps,
        "teardown": None if last is None else max(0.0, ended - last - offset),
    }
    wall = ended - launched
    whole["other"] = wall - sum(v for v in whole.values() if v is not None)
    return RankPhases(
        rank=rank.rank,
        host=rank.host,
        wall_s=wall,
        whole={name: whole[name] for name in PHASES},
        step=mean_step(means, rank.rank),
        other_parts={name: _span_s(rank, name) for name in OTHER_SPANS},
    )


def _process_start(rank: RankRecord) -> float | None:
    if rank.continuations and rank.continuations[0].before_started_unix_s is not None:
        return rank.continuations[0].before_started_unix_s
    if rank.status is not None:
        return rank.status.process_started_unix_s
    imports = rank.span("imports")
    return None if imports is None else imports.started_unix_s


def _span_s(rank: RankRecord, name: str) -> float | None:
    spans = [s.ended_unix_s - s.started_unix_s for s in rank.spans if s.name == name]
    return sum(spans) if spans else None
