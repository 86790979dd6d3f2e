"""The rates of all configurations of one run, by name, and every statement about their differences.

A rate is a speed in samples per second, or one over the time to a target. Each repeat contributes
one value. A configuration has the geometric mean of its repeats, so a ratio of two configurations
is the ratio of their rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.statistics.fastest import TIE_MARGIN, Fastest, find_fastest
from paceline.analysis.statistics.intervals import (
    CONFIDENCE,
    Estimate,
    Interval,
    estimate,
    single_trial_log_mean,
)
from paceline.analysis.statistics.layout import (
    Layout,
    fit_layout,
    log_ratio,
    log_speed,
    values_table,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatRate:
    """The rate of one repeat.

    steps: the logarithm of the rate with the noise of the steps of this repeat. None: the steps are
    too few to show it, or resemble each other for too long.
    """

    log_rate: float
    steps: Estimate | None = None

    @property
    def rate(self) -> float:
        return math.exp(self.log_rate)


def repeat_rate(samples: NDArray[np.float64], seconds: NDArray[np.float64]) -> RepeatRate | None:
    """Return the samples of all steady steps over their total time; None without steps.

    Stalls count, because they take time from the training. samples, seconds: by step, in order.
    """
    if not len(seconds):
        return None
    log_rate = math.log(float(samples.sum()) / float(seconds.sum()))
    step = single_trial_log_mean(seconds / samples)
    if step is None or not step.is_reliable:
        return RepeatRate(log_rate=log_rate)
    return RepeatRate(log_rate=log_rate, steps=estimate(log_rate, step.error, step.degrees))


class RunRates:
    """Rates by configuration and repeat, with the noise of the run they come from."""

    def __init__(self, rates: Mapping[str, Mapping[int, RepeatRate]]) -> None:
        self.repeats = {name: dict(found) for name, found in rates.items()}
        self._index = {name: number for number, name in enumerate(self.repeats)}
        table = values_table(
            {
                name: {repeat: rate.log_rate for repeat, rate in found.items()}
                for name, found in self.repeats.items()
            }
        )
        self.layout: Layout | None = fit_layout(table, list(self.repeats)) if table.size else None

    @property
    def has_noise(self) -> bool:
        """False if the noise between repeats is unknown: nothing can be said of differences."""
        return self.layout is not None and self.layout.degrees > 0

    def log_rate(self, name: str) -> Estimate | None:
        """Return the logarithm of a rate with the spread of whole runs; None without repeats."""
        if self.layout is None or not self.repeats.get(name):
            return None
        return log_speed(self.layout, self._index[name])

    def rate(self, name: str) -> Interval | None:
        """Return the geometric mean over repeats with the spread of whole runs.

        With a single repeat the interval is that of its steps, if there are enough of them.
        """
        found = self.log_rate(name)
        if found is None:
            return None
        if len(self.repeats[name]) == 1 and math.isinf(found.high):
            (only,) = self.repeats[name].values()
            found = only.steps or found
        return found.exponential()

    def log_ratio(self, first: str, second: str) -> Estimate | None:
        """Return the logarithm of first / second; None without common repeats."""
        if self.layout is None or not (self.repeats.get(first) and self.repeats.get(second)):
            return None
        return log_ratio(self.layout, self._index[first], self._index[second])

    def ratio(self, first: str, second: str) -> Interval | None:
        """Return first / second; None without common repeats."""
        found = self.log_ratio(first, second)
        return None if found is None else found.exponential()

    def is_faster(self, first: str, second: str) -> bool:
        """Tell whether the first is separated from the second, if only these two are compared."""
        found = self.fastest((first, second))
        return found.leader == first and second in {place.name for place in found.separated}

    def fastest(
        self,
        names: Iterable[str] | None = None,
        *,
        level: float = 1 - CONFIDENCE,
        margin: float = TIE_MARGIN,
    ) -> Fastest:
        """Compare the named configurations with the fastest of them; None takes all.

        level: family-wise error. margin: of a tie, as a share of the speed.
        """
        chosen = [
            self._index[n]
            for n in (self.repeats if names is None else names)
            if self.repeats.get(n)
        ]
        if self.layout is None or not chosen:
            return Fastest()
        return find_fastest(self.layout, chosen, level=level, margin=margin)
