"""Results that are computed from one finished trial alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from paceline.analysis.equivalence.check import Equivalence, equivalence_of
from paceline.analysis.statistics.rates import RepeatRate, repeat_rate
from paceline.analysis.trial.evaluation import (
    Evaluations,
    TargetTime,
    read_evaluations,
    target_time,
)
from paceline.analysis.trial.load import Disturbance, recorded_load
from paceline.analysis.trial.phases import PipelineTimes, RankPhases, trial_phases, trial_pipeline
from paceline.analysis.trial.reading import TrialRecord, read_hosts
from paceline.analysis.trial.recovery import Recovery, checkpoint_delay_s, recoveries
from paceline.analysis.trial.steps import GlobalSteps, global_steps, read_steps
from paceline.analysis.trial.stragglers import read_updates
from paceline.analysis.trial.usage import (
    HostUsage,
    SidecarUsage,
    host_usage,
    sidecar_usage,
)
from paceline.measure.records.layout import TrialFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAnalysis:
    """One finished trial with the results that do not depend on other trials."""

    record: TrialRecord
    steps: GlobalSteps
    phases: list[RankPhases]
    usage: HostUsage
    sidecar: SidecarUsage
    disturbance: Disturbance | None
    pipeline: PipelineTimes | None
    evaluations: Evaluations | None
    updates: pl.DataFrame | None  # made without a barrier, see `staleness`
    target_time: TargetTime | None
    equivalence: Equivalence | None
    samples_per_s: RepeatRate | None
    steps_per_s: RepeatRate | None
    wholes_per_s: RepeatRate | None  # trainings, each from the launch to the end
    step_median_s: float | None
    step_p95_s: float | None  # 95th percentile
    time_to_first_step_s: float | None
    recoveries: tuple[Recovery, ...] = ()
    checkpoint_delay_s: float | None = None  # median

    @property
    def repeat(self) -> int:
        return self.record.trial.repeat


def analyse_trial(record: TrialRecord, baseline: TrialFiles | None) -> TrialAnalysis:
    """Analyse one finished trial; check it against `baseline` if that was not done yet."""
    table = read_steps(record)
    steps = global_steps(record, table)
    hosts = read_hosts(record.files)
    first = None
    started = len(steps.step) > 0 and steps.step[0] == 0
    if record.outcome is not None and started and record.dilation == 1:  # sleeps are not slowed
        first = float(steps.ended_unix_s[0]) - record.outcome.launched_unix_s
    samples, seconds, counts = steps.rounds(record.trial.round_steps)
    step_s = seconds / counts
    evaluations = read_evaluations(record, steps)
    phases = trial_phases(record, table)
    return TrialAnalysis(
        record=record,
        steps=steps,
        phases=phases,
        usage=host_usage(record, hosts),
        sidecar=sidecar_usage(hosts),
        disturbance=recorded_load(record),
        pipeline=trial_pipeline(record, table),
        evaluations=evaluations,
        updates=read_updates(record),
        target_time=target_time(record, steps, evaluations),
        equivalence=None if baseline is None else equivalence_of(record.files, baseline),
        samples_per_s=repeat_rate(samples, seconds),
        steps_per_s=repeat_rate(counts, seconds),
        wholes_per_s=None if record.dilation > 1 else _wholes_per_s(phases),
        step_median_s=float(np.median(step_s)) if len(step_s) else None,
        step_p95_s=float(np.quantile(step_s, 0.95)) if len(step_s) else None,
        time_to_first_step_s=first,
        recoveries=recoveries(record, table),
        checkpoint_delay_s=checkpoint_delay_s(record),
    )


def _wholes_per_s(phases: Sequence[RankPhases]) -> RepeatRate | None:
    """Return one over the time from the launch to the end, without the checks after the training,
    which are no part of it; None if the end is not known."""
    if not phases:
        return None
    whole_s = phases[0].wall_s - (phases[0].other_parts["bookkeeping"] or 0.0)
    return repeat_rate(np.ones(1), np.array([whole_s])) if whole_s > 0 else None
