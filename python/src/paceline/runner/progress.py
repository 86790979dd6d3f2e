"""Interface for the progress of a run."""

from __future__ import annotations

from typing import Protocol

from paceline.plan.trial import Trial
from paceline.records.layout import TrialFiles
from paceline.records.rows import Outcome


class Progress(Protocol):
    """Receives the progress of a run; all methods return at once."""

    def stage(self, text: str) -> None: ...
    def planned(self, summary: str) -> None: ...
    def data(self, done: int, total: int) -> None: ...
    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None: ...
    def trial_ended(self, trial: Trial, outcome: Outcome) -> None: ...
