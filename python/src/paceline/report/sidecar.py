"""Cost of the sidecar in the report: its CPU and memory, and its effect on step times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.labels import short_name
from paceline.analysis.sidecar_effect import sidecar_effects
from paceline.report import wording

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.sidecar_effect import SidecarEffect
    from paceline.analysis.trial_analysis import TrialAnalysis


def sidecar_cost(comparison: Comparison) -> dict[str, Any] | None:
    """Return the highest cost of a sidecar in the run, and its effect on step times.

    None where there was no sidecar.
    """
    trials = [t for found in comparison.trials.values() for t in found]
    cores = _known(t.usage.sidecar_core_percent for t in trials)
    memory = _known(t.usage.sidecar_rss_peak_bytes for t in trials)
    if not cores or not memory:
        return None
    effects = sidecar_effects(comparison.trials.values())
    return {
        "core_percent": max(cores),
        "rss_mib": max(memory) / 2**20,
        "interval_s": min(_known(t.usage.sidecar_interval_s for t in trials), default=None),
        "missed_words": _missed(trials),
        "effects": [_effect(comparison, effect) for effect in effects],
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _missed(trials: list[TrialAnalysis]) -> str:
    samples = sum(t.usage.sidecar_samples for t in trials)
    missed = sum(t.usage.sidecar_missed_ticks for t in trials)
    gaps = sum(t.usage.sidecar_gaps for t in trials)
    words = f"It missed {missed} of {samples + missed} samples"
    if gaps:
        words += f"; {gaps} {'stretch has' if gaps == 1 else 'stretches have'} no samples"
    return f"{words}."


def _effect(comparison: Comparison, effect: SidecarEffect) -> str:
    row = comparison.row(effect.configuration)
    ratio = effect.step_ratio
    verdict = "no significant difference" if ratio.contains(1) else "a significant difference"
    pairs = f"{effect.pairs} {'pair' if effect.pairs == 1 else 'pairs'} of repeats"
    name = f"{row.workload}, {short_name(row, comparison.rows)}"
    return (
        f"{name}: with the sidecar a step took {ratio.median:.3f} times as long as without "
        f"({ratio.low:.3f}{wording.DASH}{ratio.high:.3f}, {pairs}): {verdict}."
    )
