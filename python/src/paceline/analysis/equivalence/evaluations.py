"""Compare the last evaluations of a configuration with what seeds of the baseline explain.

Over many steps rounding alone moves evaluations apart, so they do not decide whether trainings are
equivalent. A difference that is larger than the one between two seeds is still worth a look.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import scipy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.trial.evaluation import Evaluations

_UNMEASURED = 0.05  # of the baseline's value: a difference that is named where no seed was repeated
_CONFIDENCE = 0.95


def unexplained_evaluations(
    ours: Mapping[int, Evaluations], baselines: Mapping[int, Evaluations]
) -> list[str]:
    """Name each metric whose last value differs by more than seeds explain.

    ours, baselines: the evaluations of one trial for each seed.
    """
    common = sorted(ours.keys() & baselines.keys())
    if not common:
        return []
    found = []
    for metric in baselines[common[0]].metrics:
        own = _last(metric, [ours[seed] for seed in common])
        theirs = _last(metric, [baselines[seed] for seed in common])
        if len(own) < len(common) or len(theirs) < len(common):
            continue
        every = _last(metric, list(baselines.values()))
        value, expected = statistics.median(own), statistics.median(theirs)
        resolution = max(baselines[seed].resolution.get(metric, 0.0) for seed in common)
        limit, words = _explained(every, expected)
        if abs(value - expected) > max(limit, 1.5 * resolution):
            found.append(f"{metric} ends at {value:.3g}, the baseline's at {expected:.3g}; {words}")
    return found


def _explained(values: Sequence[float], expected: float) -> tuple[float, str]:
    """Return the largest difference that two seeds explain, and the words for it."""
    if len(values) < 2:
        words = "its spread over seeds was not measured (vary_seed = true with repeats measures it)"
        return _UNMEASURED * abs(expected), words
    spread = statistics.stdev(values)
    quantile = float(scipy.special.stdtrit(len(values) - 1, (1 + _CONFIDENCE) / 2))
    limit = quantile * spread * math.sqrt(2)
    return limit, f"two of its {len(values)} seeds differ by at most {limit:.2g} in 95 %"


def _last(metric: str, evaluations: Sequence[Evaluations]) -> list[float]:
    """Return the last values that are known and finite."""
    values = [float(e.metrics[metric][-1]) for e in evaluations if metric in e.metrics]
    return [value for value in values if math.isfinite(value)]
