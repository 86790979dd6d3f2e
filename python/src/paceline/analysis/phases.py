"""Where the time went: from the launch command to its exit, per rank, adding up to the whole.

`other` is what no other phase claims: rendezvous, building the model, writing results, and what a
step does beside its phases. So the phases of a rank always add up to the wall time.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from paceline.analysis.ranks import stage_of
from paceline.analysis.steps import rows_by_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.analysis.reading import RankRecord, TrialRecord
    from paceline.records.rows import StepRow

PHASES = (
    "launch",
    "imports",
    "data_load",
    "data_wait",
    "forward",
    "backward",
    "bubble",
    "comm_wait",
    "comm_transfer",
    "optimizer",
    "other",
    "teardown",
)
STEP_PHASES = (
    "data_wait",
    "forward",
    "backward",
    "bubble",
    "comm_wait",
    "comm_transfer",
    "optimizer",
    "other",
)
OTHER_SPANS = ("rendezvous", "model_build", "bookkeeping")

Phases = dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPhases:
    """One rank's time in seconds.

    whole: by PHASES, adding up to `wall_s`; None where there is nothing to measure (communication
    without peers, the bubble without a pipeline, launch where the process's start is unknown).
    step: by STEP_PHASES, mean over the steps after the warm-up, adding up to the mean step.
    other_parts: the known parts of `other`.
    """

    rank: int
    host: str | None
    wall_s: float
    whole: Phases
    step: Phases
    other_parts: Phases


def trial_phases(record: TrialRecord) -> list[RankPhases]:
    """Every rank's time; empty if the trial has no outcome (its end is unknown)."""
    if record.outcome is None:
        return []
    waits = communication_waits(record)
    launched, ended = record.outcome.launched_unix_s, record.outcome.ended_unix_s
    warmup = record.trial.training.warmup_steps
    return [_rank_phases(r, launched, ended, waits[r.rank], warmup) for r in record.ranks]


def mean_step(rank: RankRecord, waits: Mapping[int, float], warmup: int) -> Phases:
    """The mean over a rank's steps from `warmup` on, by STEP_PHASES; all None without such steps.

    waits: the rank's, from `communication_waits`.
    """
    steady = [row for row in rows_by_step(rank).values() if row.step >= warmup]
    if not steady:
        return dict.fromkeys(STEP_PHASES)
    sums = _step_sums(steady, waits)
    sums["other"] = sum(row.other_s for row in steady)
    return {name: None if (v := sums[name]) is None else v / len(steady) for name in STEP_PHASES}


def communication_waits(record: TrialRecord) -> dict[int, dict[int, float]]:
    """For each rank and step, how much of `comm_s` was waiting for the slowest rank's gradients.

    That is from this rank's gradients being ready to the last rank's, on one clock, at most
    `comm_s`; the rest is transfer. Of a pipeline, only ranks of one stage average with one another.
    Steps without communication are left out.
    """
    stages = {rank.rank: stage_of(record.trial, rank) for rank in record.ranks}
    slowest: dict[tuple[int, int], float] = {}
    for rank in record.ranks:
        for row in rank.steps:
            if row.comm_ready_unix_s is not None:
                key = (stages[rank.rank], row.step)
                ready = row.comm_ready_unix_s + rank.clock_offset_s
                slowest[key] = max(slowest.get(key, ready), ready)
    return {
        rank.rank: {
            row.step: _wait(row, slowest[stages[rank.rank], row.step] - rank.clock_offset_s)
            for row in rank.steps
            if row.comm_s is not None and row.comm_ready_unix_s is not None
        }
        for rank in record.ranks
    }


def _wait(row: StepRow, slowest_unix_s: float) -> float:
    if row.comm_s is None or row.comm_ready_unix_s is None:
        return 0.0
    return min(row.comm_s, max(0.0, slowest_unix_s - row.comm_ready_unix_s))


def mean_over_ranks(ranks: Sequence[Mapping[str, float | None]]) -> Phases:
    """Each phase's mean; None where no rank has it."""
    return _reduced(ranks, fmean)


def median_over_repeats(repeats: Sequence[Mapping[str, float | None]]) -> Phases:
    """Each phase's median; None where no repeat has it."""
    return _reduced(repeats, median)


def _reduced(
    rows: Sequence[Mapping[str, float | None]], reduce: Callable[[list[float]], float]
) -> Phases:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [v for row in rows if (v := row.get(name)) is not None] for name in names}
    return {name: reduce(found) if found else None for name, found in values.items()}


def _rank_phases(
    rank: RankRecord, launched: float, ended: float, waits: Mapping[int, float], warmup: int
) -> RankPhases:
    rows = list(rows_by_step(rank).values())
    offset = rank.clock_offset_s
    started = _process_start(rank)
    last = max((s.ended_unix_s for s in rank.spans), default=None)
    whole: Phases = {
        # the launcher's clock is taken for rank 0's
        "launch": None if started is None else max(0.0, started + offset - launched),
        "imports": _span_s(rank, "imports"),
        "data_load": _span_s(rank, "data_load"),
        **_step_sums(rows, waits),
        "teardown": None if last is None else max(0.0, ended - last - offset),
    }
    wall = ended - launched
    whole["other"] = wall - sum(v for v in whole.values() if v is not None)
    return RankPhases(
        rank=rank.rank,
        host=rank.host,
        wall_s=wall,
        whole={name: whole[name] for name in PHASES},
        step=mean_step(rank, waits, warmup),
        other_parts={name: _span_s(rank, name) for name in OTHER_SPANS},
    )


def _process_start(rank: RankRecord) -> float | None:
    if rank.status is not None:
        return rank.status.process_started_unix_s
    imports = rank.span("imports")
    return None if imports is None else imports.started_unix_s


def _span_s(rank: RankRecord, name: str) -> float | None:
    spans = [s.ended_unix_s - s.started_unix_s for s in rank.spans if s.name == name]
    return sum(spans) if spans else None


def _step_sums(rows: Sequence[StepRow], waits: Mapping[int, float]) -> Phases:
    """Totals over `rows`; bubble and communication are None where there was none."""
    if not rows:
        return dict.fromkeys(name for name in STEP_PHASES if name != "other")
    communicated = [(row.step, row.comm_s) for row in rows if row.comm_s is not None]
    wait = sum(waits.get(step, 0.0) for step, _ in communicated)
    bubbles = [row.bubble_s for row in rows if row.bubble_s is not None]
    return {
        "data_wait": sum(row.data_wait_s for row in rows),
        "forward": sum(row.forward_s for row in rows),
        "backward": sum(row.backward_s for row in rows),
        "bubble": sum(bubbles) if bubbles else None,
        "comm_wait": wait if communicated else None,
        "comm_transfer": sum(s for _, s in communicated) - wait if communicated else None,
        "optimizer": sum(row.optimizer_s for row in rows),
    }
