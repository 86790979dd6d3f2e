"""Speeds of the finished trials of a run, without their causes.

For comparisons of whole runs, and for the decision whether another repeat is needed. Reading a run
this way takes a small part of the time of `compare_run`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.analysis.equivalence.check import equivalence_baseline, equivalence_of
from paceline.analysis.statistics.rates import RunRates
from paceline.analysis.trial.evaluation import read_evaluations, target_time
from paceline.analysis.trial.reading import load_manifest, load_run
from paceline.analysis.trial.speed import samples_rate
from paceline.analysis.trial.steps import global_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.statistics.rates import RepeatRate
    from paceline.analysis.trial.reading import TrialRecord
    from paceline.plan.trial import Trial
    from paceline.records.layout import RunFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Samples per second of the finished trials, by configuration and repeat."""

    manifest: Mapping[str, Any]
    rates: dict[str, dict[int, RepeatRate]] = field(default_factory=dict)
    trials: dict[str, Trial] = field(default_factory=dict)  # one repeat of each configuration
    # None: a repeat was not checked, or is lossy on purpose
    equivalent: dict[str, bool | None] = field(default_factory=dict)

    def of_workload(self, workload: str) -> RunRates:
        """Return the speeds of one workload's configurations."""
        return RunRates(
            {n: r for n, r in self.rates.items() if self.trials[n].training.workload == workload}
        )

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(trial.training.workload for trial in self.trials.values()))


def trial_speed(record: TrialRecord) -> RepeatRate | None:
    """Return the samples per second of the steady steps of a trial; None if it has none."""
    return samples_rate(record, global_steps(record))


def target_speed(record: TrialRecord) -> RepeatRate | None:
    """Return the rate at which a trial reached its target; None if it missed it."""
    steps = global_steps(record)
    found = target_time(record, steps, read_evaluations(record, steps))
    return found.rate if found is not None and found.reached else None


def read_speeds(run: RunFiles) -> Speeds:
    """Read the speeds of a run. Raises DataError if a file is damaged."""
    found = Speeds(manifest=load_manifest(run))
    finished = [record for record in load_run(run) if record.finished]
    baselines = [record for record in finished if record.trial.is_baseline]
    for record in finished:
        speed = trial_speed(record)
        if speed is None:
            continue
        name = record.trial.configuration
        found.rates.setdefault(name, {})[record.trial.repeat] = speed
        found.trials.setdefault(name, record.trial)
        found.equivalent[name] = _both(
            found.equivalent.get(name, True), _equivalent(record, baselines)
        )
    return found


def _equivalent(record: TrialRecord, baselines: Sequence[TrialRecord]) -> bool | None:
    workload = record.trial.training.workload
    same = [each for each in baselines if each.trial.training.workload == workload]
    baseline = equivalence_baseline(record, same)
    return None if baseline is None else equivalence_of(record.files, baseline).equivalent


def _both(one: bool | None, other: bool | None) -> bool | None:
    """Combine two repeats: one that is not equivalent decides."""
    if False in (one, other):
        return False
    return None if None in (one, other) else True
