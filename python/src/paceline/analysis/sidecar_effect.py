"""Cost of the sidecar: step times of trials with it and without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.analysis.noise import run_noise
from paceline.analysis.statistics import Interval, Series, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.analysis.trial_analysis import TrialAnalysis


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarEffect:
    """Step time of trials with the sidecar, relative to the same trials without it."""

    configuration: str
    pairs: int  # of repeats
    step_ratio: Interval  # an interval that includes 1 shows no significant difference


def sidecar_effects(trials: Iterable[Sequence[TrialAnalysis]]) -> list[SidecarEffect]:
    """Compare the repeats with the sidecar to those without, for each configuration with both.

    The n-th repeat with it is paired with the n-th repeat without it.
    """
    effects = []
    for repeats in trials:
        watched = _step_times(repeats, enabled=True)
        alone = _step_times(repeats, enabled=False)
        noises = run_noise({"watched": watched, "alone": alone})
        noise = noises.of_ratio("watched", "alone")
        ratio = ratio_interval(watched, alone, noise)
        if ratio is not None:
            effects.append(
                SidecarEffect(
                    configuration=repeats[0].record.trial.configuration,
                    pairs=min(len(watched), len(alone)),
                    step_ratio=ratio,
                )
            )
    return effects


def _step_times(repeats: Sequence[TrialAnalysis], *, enabled: bool) -> dict[int, Series]:
    chosen = [
        trial.step_s
        for trial in sorted(repeats, key=lambda t: t.repeat)
        if trial.record.trial.telemetry.enabled is enabled and trial.step_s is not None
    ]
    return dict(enumerate(chosen))
