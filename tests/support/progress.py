"""Progress of a run that nobody sees."""

from __future__ import annotations

from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import Outcome
from paceline.plan.trials.trial import Trial


class Quiet:
    """Counts."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, int]] = []  # number of each trial, and of how many
        self.looks: list[int] = []  # finished trials at each call between two trials

    def planned(self, summary: str, trials: object, expected_s: object) -> None: ...
    def stage(self, text: str) -> None: ...
    def data(self, done: int, total: int) -> None: ...
    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None:
        self.shown.append((number, of))

    def trial_ended(self, trial: Trial, outcome: Outcome) -> None: ...
    def between_trials(self, run: RunFiles) -> None:
        self.looks.append(len(list(run.root.glob("trials/*/outcome.json"))))
