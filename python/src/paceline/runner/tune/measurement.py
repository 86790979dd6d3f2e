"""One short trial: run it like any other, or read the records of an earlier search."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.analysis.between_runs.speeds import trial_speed
from paceline.analysis.equivalence.check import read_equivalence
from paceline.analysis.statistics.rates import RepeatRate
from paceline.analysis.trial.reading import load_trial
from paceline.measure.records.attempts import set_aside
from paceline.measure.records.layout import RunFiles
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.equivalence import check_equivalences
from paceline.runner.trials.planning import Progress
from paceline.runner.trials.run_trial import failure_of, is_finished, run_followed


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """Samples per second of the steady steps, or the reason why there are none."""

    samples_per_s: RepeatRate | None
    failure: str | None = None


class TrialMeasurer:
    """Measures trials on this machine, and keeps each in a run directory.

    A trial with an outcome, good or bad, is not repeated unless it is a baseline, because nothing
    can be compared without a baseline. A trial that is not equivalent to the baseline counts as
    failed: its speed is meaningless. (Trials with lossy communication are not required to be
    equivalent.)
    """

    def __init__(
        self,
        files: RunFiles,
        baselines: Mapping[str, Trial],
        progress: Progress,
        *,
        limit_s: float | None,
    ) -> None:
        """baselines: the sequential trial of each workload, which is measured before others.

        `measure` raises RankFailed or TimedOut if one of them fails.
        """
        self._files = files
        self._baselines = baselines
        self._progress = progress
        self._deadline_s = None if limit_s is None else time.monotonic() + limit_s

    def measure(self, trial: Trial, number: int, of: int) -> MeasuredRate | None:
        """Return the measurement, made only if there is none yet; None if the time budget is
        spent."""
        files = self._files.trial(trial.id)
        if not self._has_ended(trial):
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                return None
            set_aside(self._files, trial)
            outcome = run_followed(trial, files, self._progress, number, of)
            if trial.is_baseline and outcome.status != "ok":
                raise failure_of(outcome, self._files)
        baseline = self._baselines[trial.training.workload]
        check_equivalences([baseline, trial], self._files, keep_tensors=False)
        return self._read(trial)

    def _has_ended(self, trial: Trial) -> bool:
        files = self._files.trial(trial.id)
        return is_finished(files) if trial.is_baseline else files.outcome.exists()

    def _read(self, trial: Trial) -> MeasuredRate:
        record = load_trial(self._files.trial(trial.id))
        if not record.finished:
            reason = None if record.outcome is None else record.outcome.message
            return MeasuredRate(samples_per_s=None, failure=reason or "it left no reason")
        different = _difference(record.files.equivalence) if trial.is_exact else None
        if different is not None:
            return MeasuredRate(samples_per_s=None, failure=different)
        found = trial_speed(record)
        failure = None if found is not None else "it recorded no steady step"
        return MeasuredRate(samples_per_s=found, failure=failure)


def _difference(equivalence: Path) -> str | None:
    """Return how the trial differs from the baseline; None if it does not, or this is unknown."""
    if not equivalence.exists():
        return None
    faults = read_equivalence(equivalence).faults
    return f"not equivalent to the baseline: {'; '.join(faults)}" if faults else None
