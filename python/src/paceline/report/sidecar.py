"""What the report says of the sidecar's own cost: its CPU and memory, and what training noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.host_curves import sidecar_effects
from paceline.analysis.usage import risen
from paceline.report import wording
from paceline.report.labels import short_name

if TYPE_CHECKING:
    from paceline.analysis.comparison import Comparison, TrialAnalysis
    from paceline.analysis.host_curves import SidecarEffect


def sidecar_cost(comparison: Comparison) -> dict[str, Any] | None:
    """The dearest sidecar of the run, and sentences on trials with it against trials without.

    None where there was no sidecar.
    """
    trials = [t for found in comparison.trials.values() for t in found]
    cores = [v for t in trials if (v := t.usage.sidecar_core_percent) is not None]
    memory = [v for t in trials if (v := t.usage.sidecar_rss_peak_bytes) is not None]
    if not cores or not memory:
        return None
    effects = sidecar_effects(comparison.trials.values())
    return {
        "core_percent": max(cores),
        "rss_mib": max(memory) / 2**20,
        "interval_s": _interval_s(trials),
        "missed_words": _missed(trials),
        "effects": [_effect(comparison, effect) for effect in effects],
    }


def _interval_s(trials: list[TrialAnalysis]) -> float | None:
    """The shortest of all traces."""
    headers = [host.header for trial in trials for host in trial.record.hosts if host.samples]
    found = [float(h["interval_s"]) for h in headers if h.get("interval_s") is not None]
    return min(found, default=None)


def _missed(trials: list[TrialAnalysis]) -> str:
    hosts = [host for trial in trials for host in trial.record.hosts if host.samples]
    samples = sum(len(host.samples) for host in hosts)
    missed = round(sum(risen(s.sidecar_missed_ticks for s in host.samples) for host in hosts))
    gaps = sum(len(host.gaps) for host in hosts)
    words = f"It missed {missed} of {samples + missed} samples"
    if gaps:
        words += f", and died and was started again {gaps} {'time' if gaps == 1 else 'times'}"
    return f"{words}."


def _effect(comparison: Comparison, effect: SidecarEffect) -> str:
    row = comparison.row(effect.configuration)
    ratio = effect.step_ratio
    verdict = (
        "no difference outside the noise" if ratio.contains(1) else "a difference beyond the noise"
    )
    pairs = f"{effect.pairs} {'pair' if effect.pairs == 1 else 'pairs'} of repeats"
    name = f"{row.workload}, {short_name(row, comparison.rows)}"
    return (
        f"{name}: with the sidecar a step took {ratio.median:.3f} times as long as without "
        f"({ratio.low:.3f}{wording.DASH}{ratio.high:.3f}, {pairs}): {verdict}."
    )
