"""Time accounting: from the launch command to its exit, per rank, adding up to the whole.

`other` is the time that no other phase claims: rendezvous, building the model, writing results, and
the rest of a step. Therefore the phases of a rank always add up to the wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.trial.reading import RankRecord, TrialRecord, pipeline_counts
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
    found = [_rank_phases(r, launched, ended, sums, means) for r in record.ranks]
    return [_without_start(phases) for phases in found] if record.dilation > 1 else found


def _without_start(phases: RankPhases) -> RankPhases:
    """Count start and end as `other` where hosts take turns: sleeps and polls are not slowed."""
    start: Phases = dict.fromkeys(("launch", "imports", "teardown"))
    moved = sum(phases.whole[name] or 0.0 for name in start)
    other = (phases.whole["other"] or 0.0) + moved
    return replace(phases, whole={**phases.whole, **start, "other": other})


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


# --- computing, waiting and traffic of a pipeline's stages ---------------------------------------
#
# The bubble of a stage in a step is the share of its gradient computation in which it waited for a
# neighbour: bubble / (forward + backward + bubble). No stage waits for the others at the end of a
# step: it starts on the next one, and what it then waits for its first micro-batch is that step's
# bubble, so nothing that a stage idles is left out. The measured bubble of a trial is the mean over
# its stages (and replicas), then the median over the steady steps, then over repeats.
# It is compared with (s - 1) / (m + s - 1), which is exact for both schedules if all stages and
# micro-batches take the same time and moving data takes none (Huang et al., GPipe, NeurIPS 2019,
# section 2.3; Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021,
# section 2.2).


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage's median step in seconds; the mean over replicas where there are several."""

    stage: int
    forward_s: float
    backward_s: float
    bubble_s: float
    busy_share: float  # (forward + backward) / (forward + backward + bubble)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTraffic:
    """A split point of the model and the bytes that cross it in a step of one replica."""

    before: str  # the first layer after the split point
    bytes_forward: float
    bytes_backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Time use of a pipeline in one trial, or the medians of its repeats."""

    stages: tuple[StageTimes, ...]  # in order; empty where no step was measured
    bubble_measured: float | None
    bubble_theoretical: float
    split_points: tuple[SplitTraffic, ...]


def theoretical_bubble(stages: int, micro_batches: int) -> float:
    """Return the idle share of a pipeline whose stages and micro-batches all take the same time."""
    return (stages - 1) / (micro_batches + stages - 1)


def trial_pipeline(record: TrialRecord, steps: RankSteps) -> PipelineTimes | None:
    """Compute the pipeline of one trial; None if it has none."""
    counts = pipeline_counts(record.trial)
    if counts is None:
        return None
    stages_planned, micro_batches = counts
    steady = steps.steady()
    seconds = [np.nan_to_num(steady[f"{name}_s"]) for name in ("forward", "backward", "bubble")]
    times = np.stack(seconds, axis=2)  # shape (ranks, steps, 3)
    whole = times.sum(axis=2)
    busy = np.divide(
        times[:, :, 0] + times[:, :, 1], whole, out=np.zeros_like(whole), where=whole > 0
    )
    return PipelineTimes(
        stages=tuple(
            _stage(stage, times[steps.stages == stage], busy[steps.stages == stage])
            for stage in range(stages_planned)
            if len(steady.step) and (steps.stages == stage).any()
        ),
        bubble_measured=1 - float(np.median(busy.mean(axis=0))) if busy.size else None,
        # Only a pipeline that drains in every step has a bubble in theory.
        bubble_theoretical=0.0
        if record.trial.reduction.updates_within_step
        else theoretical_bubble(stages_planned, micro_batches),
        split_points=_split_points({} if record.result is None else record.result.communication),
    )


def median_pipeline(repeats: Sequence[PipelineTimes]) -> PipelineTimes | None:
    """Return the medians over the repeats of a configuration; None without any.

    The split points are the first repeat's: where they are chosen by profiling, repeats may differ.
    """
    if not repeats:
        return None
    by_stage: dict[int, list[StageTimes]] = {}
    for repeat in repeats:
        for stage in repeat.stages:
            by_stage.setdefault(stage.stage, []).append(stage)
    return PipelineTimes(
        stages=tuple(_median_stage(stage, found) for stage, found in sorted(by_stage.items())),
        bubble_measured=median_of(repeat.bubble_measured for repeat in repeats),
        bubble_theoretical=repeats[0].bubble_theoretical,
        split_points=repeats[0].split_points,
    )


def _stage(stage: int, times: NDArray[np.float64], busy: NDArray[np.float64]) -> StageTimes:
    """times: shape (replicas, steps, 3); busy: shape (replicas, steps)."""
    forward, backward, bubble = np.median(times.mean(axis=0), axis=0).tolist()
    return StageTimes(
        stage=stage,
        forward_s=forward,
        backward_s=backward,
        bubble_s=bubble,
        busy_share=float(np.median(busy.mean(axis=0))),
    )


def _median_stage(stage: int, found: Sequence[StageTimes]) -> StageTimes:
    return StageTimes(
        stage=stage,
        forward_s=median(s.forward_s for s in found),
        backward_s=median(s.backward_s for s in found),
        bubble_s=median(s.bubble_s for s in found),
        busy_share=median(s.busy_share for s in found),
    )


def _split_points(reported: Mapping[str, Any]) -> tuple[SplitTraffic, ...]:
    """Read the split points from `result.json`; none where no rank reported them."""
    if "first_layers" not in reported:
        return ()
    names = ("first_layers", "bytes_forward", "bytes_backward")
    return tuple(
        SplitTraffic(before=layer, bytes_forward=there, bytes_backward=back)
        for layer, there, back in zip(*(reported[name] for name in names), strict=True)
    )
