"""Speed of one trial: its samples over the total time of its steady steps, stalls included."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.statistics.rates import RepeatRate, repeat_rate
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import GlobalSteps


def samples_rate(record: TrialRecord, steps: GlobalSteps) -> RepeatRate | None:
    """Return the samples per second of the steady steps; None if there are none."""
    samples, seconds, _ = steps.rounds(record.trial.round_steps)
    return repeat_rate(samples, seconds)


def steps_rate(record: TrialRecord, steps: GlobalSteps) -> RepeatRate | None:
    """Return the steady steps per second; None if there are none."""
    _, seconds, counts = steps.rounds(record.trial.round_steps)
    return repeat_rate(counts, seconds)


def step_times_s(record: TrialRecord, steps: GlobalSteps) -> NDArray[np.float64]:
    """Return the mean step of each round of steady steps, which is a step if rounds have one."""
    _, seconds, counts = steps.rounds(record.trial.round_steps)
    return seconds / counts
