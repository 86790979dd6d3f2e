"""The rates of all configurations of one run, by name, and every statement about their differences.

A rate is a speed in samples per second, or one over the time to a target. Each repeat contributes
one value. A ratio of two configurations is the ratio of their rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy
from numpy.typing import NDArray

from paceline.analysis.statistics.fastest import TIE_MARGIN, Fastest, Standing, find_fastest
from paceline.analysis.statistics.intervals import CONFIDENCE, Estimate, Interval
from paceline.analysis.statistics.model import Belief, Fit, SharedSpread, fit, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatRate:
    """The rate of one repeat.

    is_loaded: other processes were measured to use the machine at the same time.
    """

    log_rate: float
    is_loaded: bool = False

    @property
    def rate(self) -> float:
        return math.exp(self.log_rate)


def repeat_rate(samples: NDArray[np.float64], seconds: NDArray[np.float64]) -> RepeatRate | None:
    """Return the samples of all steady steps over their total time; None without steps.

    Stalls count, because they take time from the training. samples, seconds: by step, in order.
    """
    if not len(seconds):
        return None
    return RepeatRate(log_rate=math.log(float(samples.sum()) / float(seconds.sum())))


class RunRates:
    """Rates by configuration and repeat, with the noise of the run they come from."""

    def __init__(self, rates: Mapping[str, Mapping[int, RepeatRate]]) -> None:
        self.repeats = {name: dict(found) for name, found in rates.items()}
        self._index = {name: number for number, name in enumerate(self.repeats)}
        self._numbers = sorted({repeat for found in self.repeats.values() for repeat in found})

    @property
    def has_noise(self) -> bool:
        """False if the noise between repeats is unknown: nothing can be said of differences."""
        return self._fit is not None

    def log_rate(self, name: str) -> Belief | None:
        """Return the logarithm of a rate with the spread of whole runs; None without repeats."""
        found, shared = self.relative(name), self.shared(name)
        return found if found is None or shared is None else found.widened(shared)

    def rate(self, name: str) -> Interval | None:
        """Return the rate with the spread of whole runs; None without repeats."""
        found = self.log_rate(name)
        return None if found is None else found.estimate().exponential()

    def log_ratio(self, first: str, second: str) -> Estimate | None:
        """Return the logarithm of first / second; None if no repeats connect them."""
        ours, theirs = self.relative(first), self.relative(second)
        if ours is None or theirs is None or not self._are_connected(first, second):
            return None
        return (ours - theirs).estimate()

    def ratio(self, first: str, second: str) -> Interval | None:
        """Return first / second; None if no repeats connect them."""
        found = self.log_ratio(first, second)
        return None if found is None else found.exponential()

    def log_ratio_to(self, before: RunRates, name: str) -> Belief | None:
        """Return the logarithm of this rate / that of an earlier run; None if one has no repeats.

        Repeats of two runs have nothing in common, so both have the spread of whole runs.
        """
        ours, theirs = self.relative(name), before.relative(name)
        shared = self.shared(name), before.shared(name)
        if ours is None or theirs is None:
            return None
        ratio = ours.of_another_run() - theirs
        return ratio.widened(shared[0] + shared[1]) if shared[0] and shared[1] else ratio

    def is_faster(self, first: str, second: str) -> bool:
        """Tell whether the first is separated from the second, if only these two are compared."""
        found = self.fastest((first, second))
        return found.leader == first and second in {place.name for place in found.separated}

    def disturbed(self, name: str) -> dict[int, float]:
        """Return the probability that each repeat was slowed by other work; empty if unknown."""
        if self._fit is None or name not in self._index:
            return {}
        found = self._fit.disturbed[self._index[name]]
        return {number: float(found[self._numbers.index(number)]) for number in self.repeats[name]}

    def disturbed_repeats(self, name: str) -> set[int]:
        """Return the repeats that were more probably slowed by other work than not."""
        return {repeat for repeat, chance in self.disturbed(name).items() if chance > 0.5}

    def two_speeds(self, name: str) -> float | None:
        """Return the probability that a configuration has two speeds; None if it is unknown."""
        known = self._fit is not None and bool(self.repeats.get(name))
        return float(self._fit.two_speeds[self._index[name]]) if known and self._fit else None

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
        chosen = self.repeats if names is None else names
        speeds = {n: speed for n in chosen if (speed := self.relative(n)) is not None}
        if not speeds:
            return Fastest()
        leader = max(speeds, key=lambda name: speeds[name].value)
        alone = tuple(Standing(name=name) for name in speeds)
        if not self.has_noise:
            return Fastest(leader=leader, places=alone)
        compared = {n: each for n, each in speeds.items() if self._are_connected(n, leader)}
        repeats = float(np.median([len(self.repeats[name]) for name in compared]))
        found = find_fastest(compared, repeats, level=level, margin=margin)
        apart = tuple(place for place in alone if place.name not in compared)
        return replace(found, places=found.places + apart)

    @cached_property
    def _fit(self) -> Fit | None:
        return fit(self._table, self._is_loaded)

    @cached_property
    def _table(self) -> NDArray[np.float64]:
        """The logarithms by configuration and repeat, NaN where a repeat is missing."""
        return np.array(
            [
                [found[n].log_rate if n in found else math.nan for n in self._numbers]
                for found in self.repeats.values()
            ]
        ).reshape(len(self.repeats), len(self._numbers))

    @property
    def _is_loaded(self) -> NDArray[np.bool_]:
        return np.array(
            [
                [n in found and found[n].is_loaded for n in self._numbers]
                for found in self.repeats.values()
            ],
            dtype=bool,
        ).reshape(self._table.shape)

    def relative(self, name: str) -> Belief | None:
        """Return the logarithm of a rate without what all share in a repeat."""
        found = self.repeats.get(name)
        if not found:
            return None
        if self._fit is None:
            return unknown(float(np.mean([rate.log_rate for rate in found.values()])))
        return self._fit.speeds[self._index[name]]

    def shared(self, name: str) -> SharedSpread | None:
        """Return what all share in a repeat, as a part of a mean; None if it is unknown."""
        repeats = self.repeats.get(name)
        return self._fit.shared.over(len(repeats)) if self._fit and repeats else None

    def _are_connected(self, first: str, second: str) -> bool:
        """Tell whether the two have a repeat in common, also through others."""
        return bool(self._group[self._index[first]] == self._group[self._index[second]])

    @cached_property
    def _group(self) -> NDArray[np.int64]:
        known = (~np.isnan(self._table)).astype(int)
        graph = scipy.sparse.csr_array(known @ known.T)
        found: NDArray[np.int64] = scipy.sparse.csgraph.connected_components(graph, False)[1]
        return found
