"""One configuration's row: medians over its repeats, intervals, and notes on how to read it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.equivalence import why_not_equivalent
from paceline.analysis.phases import mean_over_ranks, median_over_repeats
from paceline.analysis.pipeline import median_pipeline
from paceline.analysis.row import Row
from paceline.analysis.statistics import (
    Interval,
    RunNoise,
    Series,
    median_interval,
    ratio_interval,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline.analysis.phases import RankPhases
    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.analysis.usage import MemoryKind
    from paceline.records.phases import Phases

_SUPERLINEAR = 1.05  # efficiency above which a result asks for an explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a row needs to know of its workload's other configurations."""

    noise: RunNoise | None
    baseline: str | None
    images: Mapping[str, Mapping[int, Series]]  # images/s by configuration and repeat


_DEFAULT_BUCKET_MB = 25.0  # shown for transports that have no buckets, too


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def configuration_row(
    configuration: str, trials: Sequence[TrialAnalysis], measured: Measured
) -> Row:
    """The row of one configuration; `trials` are its finished repeats, at least one."""
    trial = trials[0].record.trial
    place = trial.placement
    speedup = _speedup(configuration, measured)
    efficiency = None if speedup is None else speedup.scaled(1 / place.cores)
    images, overall = _overall(trials)
    hashes = [t.record.result.weights_sha256 for t in trials if t.record.result is not None]
    memory, memory_kind = _memory_peak(trials)
    steps = {t.repeat: t.step_s for t in trials if t.step_s is not None}
    return Row(
        configuration=configuration,
        workload=trial.training.workload,
        launcher=trial.launcher,
        transport=trial.transport,
        local_strategy=trial.local_strategy,
        nodes=place.nodes,
        ranks=place.ranks,
        ranks_per_node=place.ranks_per_node,
        threads_per_rank=place.threads_per_rank,
        replicas=place.replicas,
        replicas_per_node=place.replicas_per_node,
        stages=place.stages,
        micro_batches=trial.option("micro_batches"),
        schedule=trial.option("schedule"),
        balance=trial.option("balance"),
        split_points=trial.option("split_points"),
        reduction=trial.option("reduction"),
        device=trial.device,
        cores=place.cores,
        precision=trial.training.precision,
        memory_format=trial.training.memory_format,
        bucket_mb=trial.option("bucket_mb") or _DEFAULT_BUCKET_MB,
        buckets_in_flight=trial.option("buckets_in_flight"),
        algorithm=trial.option("algorithm"),
        mpi_parameters=tuple(sorted((trial.option("parameters") or {}).items())),
        compression=_text(trial.option("compression")),
        averaging=_text(trial.option("averaging")),
        global_batch=trial.training.global_batch,
        repeats=len(trials),
        is_baseline=configuration == measured.baseline,
        samples_per_s=median_interval(measured.images[configuration], measured.noise),
        step_s=median_interval(steps, measured.noise),
        speedup=speedup,
        efficiency=efficiency,
        images=images,
        samples_per_s_overall=overall,
        time_to_first_step_s=_median(t.time_to_first_step_s for t in trials),
        wall_s=_median(t.phases[0].wall_s if t.phases else None for t in trials),
        phases_s=_over_trials(trials, lambda rank: rank.whole),
        step_phases_s=_over_trials(trials, lambda rank: rank.step),
        other_parts_s=_over_trials(trials, lambda rank: rank.other_parts),
        cpu_percent=_median(t.usage.cpu_percent for t in trials),
        iowait_percent=_median(t.usage.iowait_percent for t in trials),
        ram_percent_mean=_median(t.usage.ram_percent_mean for t in trials),
        ram_percent_peak=_median(t.usage.ram_percent_peak for t in trials),
        memory_peak_bytes=memory,
        memory_peak_kind=memory_kind,
        threads_median=_median(t.usage.threads_median for t in trials),
        threads_peak=_median(t.usage.threads_peak for t in trials),
        pipeline=median_pipeline([t.pipeline for t in trials if t.pipeline is not None]),
        final_loss=_median(t.steps.final_loss for t in trials),
        equivalent=_equivalent(trials),
        does_not_apply=why_not_equivalent(trial),
        max_abs_weight_diff=max(
            (
                t.equivalence.max_abs_weight_diff
                for t in trials
                if t.equivalence is not None and t.equivalence.max_abs_weight_diff is not None
            ),
            default=None,
        ),
        weights_sha256=hashes[0] if hashes else None,
        notes=tuple(_notes(configuration, trials, measured, efficiency)),
    )


def _over_trials(trials: Sequence[TrialAnalysis], part: Callable[[RankPhases], Phases]) -> Phases:
    """Mean over ranks, median over repeats."""
    return median_over_repeats([mean_over_ranks([part(r) for r in t.phases]) for t in trials])


def _speedup(configuration: str, measured: Measured) -> Interval | None:
    if measured.baseline is None:
        return None
    if configuration == measured.baseline:
        return Interval(median=1.0, low=1.0, high=1.0)
    return ratio_interval(
        measured.images[configuration], measured.images[measured.baseline], measured.noise
    )


def _overall(trials: Sequence[TrialAnalysis]) -> tuple[int | None, float | None]:
    """Images trained on after the warm-up, and those over the time that they took."""
    images, seconds = 0, 0.0
    for t in trials:
        steady = t.steps.steady(t.record.trial.training.warmup_steps)
        images += int(t.steps.samples[steady].sum())
        seconds += float(np.sum(t.steps.time_s[steady]))
    return (images, images / seconds) if images and seconds > 0 else (None, None)


def _memory_peak(trials: Sequence[TrialAnalysis]) -> tuple[float | None, MemoryKind | None]:
    """The median of one kind, proportional where any repeat has it: the two do not mix."""
    kinds: tuple[MemoryKind, ...] = ("pss", "rss")
    for kind in kinds:
        found = _median(
            t.usage.memory_peak_bytes for t in trials if t.usage.memory_peak_kind == kind
        )
        if found is not None:
            return found, kind
    return None, None


def _equivalent(trials: Sequence[TrialAnalysis]) -> bool | None:
    """Of all repeats: one that is another training spoils the row."""
    found = [None if t.equivalence is None else t.equivalence.equivalent for t in trials]
    if False in found:
        return False
    return None if None in found else True


def _notes(
    configuration: str,
    trials: Sequence[TrialAnalysis],
    measured: Measured,
    efficiency: Interval | None,
) -> Iterable[str]:
    first = trials[0].record.trial
    yield from dict.fromkeys(
        f"{check.name}: {check.reason}"
        for t in trials
        if t.equivalence is not None
        for check in t.equivalence.checks
        if check.decisive and check.passed is not True
    )
    reason = why_not_equivalent(first)
    if reason is not None:
        yield f"equivalent does not apply: {reason}"
    if measured.images[configuration] and len(measured.images[configuration]) == 1:
        yield "one repeat: the interval is over its steps, run-to-run noise is not in it"
    base = measured.images.get(measured.baseline or "", {})
    if measured.baseline and not set(base) & set(measured.images[configuration]):
        yield "no repeat in common with the baseline: no speedup"
    hashes = {t.record.result.weights_sha256 for t in trials if t.record.result is not None}
    if len(hashes) > 1:
        yield "its repeats do not end in the same weights bit for bit"
    if efficiency is not None and efficiency.low > _SUPERLINEAR:
        yield (
            f"more than its cores explain (efficiency {efficiency.median:.2f}): smaller shares may "
            "fit the caches better, or the baseline was slowed"
        )
    incomplete = [t.repeat for t in trials if len(t.record.ranks) < first.placement.ranks]
    if incomplete:
        listed = ", ".join(map(str, incomplete))
        yield f"repeat {listed}: records of some ranks are missing"


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
