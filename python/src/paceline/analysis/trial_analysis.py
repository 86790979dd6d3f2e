"""Results that are computed from one finished trial alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.equivalence.check import equivalence_of
from paceline.analysis.statistics.resampling import Series
from paceline.analysis.statistics.series import series
from paceline.analysis.trial.background_load import disturbance
from paceline.analysis.trial.evaluation import read_evaluations, target_time
from paceline.analysis.trial.phases import trial_phases
from paceline.analysis.trial.pipeline import trial_pipeline
from paceline.analysis.trial.reading import read_hosts
from paceline.analysis.trial.recovery import checkpoint_cost, recoveries
from paceline.analysis.trial.staleness import read_updates
from paceline.analysis.trial.steps import global_steps, read_steps
from paceline.analysis.trial.usage import trial_usage

if TYPE_CHECKING:
    import polars as pl

    from paceline.analysis.equivalence.check import Equivalence
    from paceline.analysis.trial.background_load import Disturbance
    from paceline.analysis.trial.evaluation import Evaluations, TargetTime
    from paceline.analysis.trial.phases import RankPhases
    from paceline.analysis.trial.pipeline import Pipeline
    from paceline.analysis.trial.reading import TrialRecord
    from paceline.analysis.trial.recovery import CheckpointCost, Recovery
    from paceline.analysis.trial.steps import GlobalSteps
    from paceline.analysis.trial.usage import Usage
    from paceline.records.layout import TrialFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAnalysis:
    """One finished trial with the results that do not depend on other trials."""

    record: TrialRecord
    steps: GlobalSteps
    phases: list[RankPhases]
    usage: Usage
    disturbance: Disturbance | None
    pipeline: Pipeline | None
    evaluations: Evaluations | None
    updates: pl.DataFrame | None  # made without a barrier, see `staleness`
    target_time: TargetTime | None
    equivalence: Equivalence | None
    samples_per_s: Series | None
    step_s: Series | None
    time_to_first_step_s: float | None
    recoveries: tuple[Recovery, ...] = ()
    checkpoints: CheckpointCost | None = None

    @property
    def repeat(self) -> int:
        return self.record.trial.repeat


def analyse_trial(record: TrialRecord, baseline: TrialFiles | None) -> TrialAnalysis:
    """Analyse one finished trial; check it against `baseline` if that was not done yet."""
    table = read_steps(record)
    steps = global_steps(record, table)
    hosts = read_hosts(record.files)
    first = None
    if record.outcome is not None and len(steps.step) and steps.step[0] == 0:
        first = float(steps.ended_unix_s[0]) - record.outcome.launched_unix_s
    samples_per_s, step_s = _reduce(record, steps)
    evaluations = read_evaluations(record, steps)
    return TrialAnalysis(
        record=record,
        steps=steps,
        phases=trial_phases(record, table),
        usage=trial_usage(record, hosts),
        disturbance=disturbance(record, hosts),
        pipeline=trial_pipeline(record, table),
        evaluations=evaluations,
        updates=read_updates(record),
        target_time=target_time(record, steps, evaluations),
        equivalence=None if baseline is None else equivalence_of(record.files, baseline),
        samples_per_s=samples_per_s,
        step_s=step_s,
        time_to_first_step_s=first,
        recoveries=recoveries(record, table),
        checkpoints=checkpoint_cost(record),
    )


def _reduce(record: TrialRecord, steps: GlobalSteps) -> tuple[Series | None, Series | None]:
    """Reduce the rates and the times of the steady steps.

    Where every step has the same number of samples, the rate is that number over the time, and the
    bootstrap is needed only once.
    """
    warmup, period = record.trial.training.warmup_steps, record.trial.round_steps
    rates, times = steps.samples_per_s(warmup, period), steps.step_s(warmup, period)
    found = series(rates, record.trial.id)
    if found is None:
        return None, None
    samples = rates * times
    if not np.allclose(samples, samples[0], rtol=1e-9, atol=0):
        return found, series(times, record.trial.id)
    log_samples = math.log(samples[0])
    mirrored = Series(
        log_median=float(np.log(np.median(times))), log_draws=log_samples - found.log_draws
    )
    return found, mirrored
