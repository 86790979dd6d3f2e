"""Computing, waiting and traffic of a pipeline's stages.

The bubble of a stage in a step is the share of its gradient computation in which it waited for a
neighbour: bubble / (forward + backward + bubble). No stage waits for the others at the end of a
step: it starts on the next one, and what it then waits for its first micro-batch is that step's
bubble, so nothing that a stage idles is left out. The measured bubble of a trial is the mean over
its stages (and replicas), then the median over the steady steps, then over repeats.
It is compared with (s - 1) / (m + s - 1), which is exact for both schedules if all stages and
micro-batches take the same time and moving data takes none (Huang et al., GPipe, NeurIPS 2019,
section 2.3; Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021,
section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.trial.configuration import pipeline_counts
from paceline.analysis.trial.phases import median_of
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import RankSteps


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
        if record.trial.updates_within_step
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
