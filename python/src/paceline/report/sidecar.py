"""Cost of the sidecar: its CPU and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.wording import mebibytes, number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.trial_analysis import TrialAnalysis


def sidecar_sentence(comparison: Comparison) -> str | None:
    """Describe the highest cost of a sidecar in the run; None where there was no sidecar."""
    trials = [t for found in comparison.trials.values() for t in found]
    cores = _known(t.usage.sidecar_core_percent for t in trials)
    memory = _known(t.usage.sidecar_rss_peak_bytes for t in trials)
    if not cores or not memory:
        return None
    interval_s = min(_known(t.usage.sidecar_interval_s for t in trials), default=None)
    every = "" if interval_s is None else f", with a sample every {number(interval_s, 2)} s"
    return (
        f"At most {number(max(cores), 2)} % of one core and {mebibytes(max(memory))} MiB, on the "
        f"host with the highest cost{every}. {_missed(trials)}"
    )


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
