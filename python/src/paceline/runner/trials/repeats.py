"""Decide before each repeat whether `repeats = "auto"` needs it, by looks at the ranking."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from paceline.analysis.between_runs.speeds import target_speed, trial_speed
from paceline.analysis.equivalence.check import read_equivalence
from paceline.analysis.statistics.intervals import FIRST_LOOK, levels
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.analysis.trial.reading import load_trial
from paceline.measure.records.documents import LookRecord, Stopping, write_stopping
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec import Experiment
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.run_trial import is_finished


class AutomaticRepeats:
    """Repeats run until the ranking of every workload is decided or the budget is used up.

    The looks of an earlier run of the same directory are made again from its files, with the same
    results, so a resumed run decides the same.
    """

    def __init__(self, experiment: Experiment, trials: Sequence[Trial], files: RunFiles) -> None:
        self._trials = trials  # grows by those that are measured again
        self._files = files
        self._levels = levels(experiment.max_repeats)
        self._deadline_s = None
        if experiment.limits.run_s is not None:
            self._deadline_s = time.monotonic() + experiment.limits.run_s
        self._speeds: dict[str, RepeatRate | None] = {}
        self._record = Stopping(
            max_repeats=experiment.max_repeats, tie_margin=experiment.tie_margin
        )

    def another(self, repeats: int) -> bool:
        """Look at the ranking; return whether a repeat is needed after this number of them."""
        decided = self._look(repeats) if repeats >= FIRST_LOOK else False
        if decided:
            self._write("decided")
        elif self._deadline_s is not None and repeats and time.monotonic() > self._deadline_s:
            self._write("time")
        else:
            return True
        return False

    def ended(self, repeats: int) -> None:
        """Record the last look, after all planned repeats."""
        self._write("decided" if self._look(repeats) else "max_repeats")

    def _look(self, repeats: int) -> bool:
        level, tie_margin = self._levels[repeats], self._record.tie_margin
        found = {
            workload: RunRates(rates).fastest(level=level, margin=tie_margin).undecided
            for workload, rates in self._ranking(repeats).items()
        }
        made = LookRecord(repeats=repeats, level=level, undecided=found)
        self._record = replace(self._record, looks=(*self._record.looks, made))
        self._write(None)
        return not any(found.values())

    def _ranking(self, repeats: int) -> dict[str, dict[str, dict[int, RepeatRate]]]:
        """Return the speeds that may be ranked, by workload, configuration and repeat.

        With a target they are those of reaching it, also of lossy configurations.
        """
        found: dict[str, dict[str, dict[int, RepeatRate]]] = {}
        excluded: set[str] = set()
        for trial in self._trials:
            if trial.planned_repeat >= repeats or not is_finished(self._files.trial(trial.id)):
                continue
            speed = self._speed(trial)
            is_fair = trial.is_exact or trial.training.target is not None
            missed = speed is None and trial.training.target is not None
            if not is_fair or missed or self._is_different(trial):
                excluded.add(trial.configuration)
            if speed is not None:
                rates = found.setdefault(trial.training.workload, {})
                rates.setdefault(trial.configuration, {})[trial.repeat] = speed
        return {
            workload: {name: each for name, each in rates.items() if name not in excluded}
            for workload, rates in found.items()
        }

    def _is_different(self, trial: Trial) -> bool:
        """Return whether the trial was shown not to be equivalent to the baseline."""
        path = self._files.trial(trial.id).equivalence
        return path.exists() and read_equivalence(path).equivalent is False

    def _speed(self, trial: Trial) -> RepeatRate | None:
        if trial.id not in self._speeds:
            record = load_trial(self._files.trial(trial.id))
            has_target = trial.training.target is not None
            self._speeds[trial.id] = target_speed(record) if has_target else trial_speed(record)
        return self._speeds[trial.id]

    def _write(self, stopped: Literal["decided", "max_repeats", "time"] | None) -> None:
        self._record = replace(self._record, stopped=stopped)
        write_stopping(self._files, self._record)
