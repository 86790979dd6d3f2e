"""Results that are computed from one finished trial alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.analysis.background_load import Disturbance
    from paceline.analysis.equivalence import Equivalence
    from paceline.analysis.phases import RankPhases
    from paceline.analysis.pipeline import Pipeline
    from paceline.analysis.reading import TrialRecord
    from paceline.analysis.statistics import Series
    from paceline.analysis.steps import GlobalSteps
    from paceline.analysis.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAnalysis:
    """One finished trial with the results that do not depend on other trials."""

    record: TrialRecord
    steps: GlobalSteps
    phases: list[RankPhases]
    usage: Usage
    disturbance: Disturbance | None
    pipeline: Pipeline | None
    equivalence: Equivalence | None
    samples_per_s: Series | None
    step_s: Series | None
    time_to_first_step_s: float | None

    @property
    def repeat(self) -> int:
        return self.record.trial.repeat
