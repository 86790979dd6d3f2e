"""Which configurations of a run are separated from the fastest one, and which tie with it.

A configuration is separated under two conditions. Its distance to the fastest one is larger than
the noise of all configurations together explains. Distances are measured in units of the noise of
the pair, and the largest one among equal configurations is drawn from the model; configurations are
tested step by step, so one that is separated leaves a smaller family for those that are nearer
(P. H. Westfall, S. S. Young, Resampling-Based Multiple Testing, 1993). And it must not be behind
only because all of its repeats were disturbed: the probability that any separation has this reason
is limited, too. The two limits add up to 5 %, so in at most 5 % of the runs any equal configuration
is separated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.analysis.statistics.intervals import CONFIDENCE, Estimate, holm
from paceline.analysis.statistics.model import FOUND_QUANTILE, Belief, Floats, normal_draws

TIE_MARGIN = 0.03
RISK_SHARE = 0.15  # of the level: for wrong conclusions about which repeats were disturbed
_MOST_DETECTABLE = math.log(10)
_TAIL, _TAIL_DEVIATIONS = 0.99, 2.58  # quantile of a normal distribution, two-sided
_MOST_FURTHER = 1000  # repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One configuration in comparison with the fastest one: separated, a tie, or undecided."""

    name: str
    log_ratio: Estimate | None = None  # fastest / this one; None: no repeats in common
    is_separated: bool = False
    is_tie: bool = False  # shown to be at most the margin behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest measured configuration, and the places of all candidates."""

    leader: str | None = None  # None if nothing was measured
    places: tuple[Standing, ...] = ()
    # ratio - 1 that this run separates with a probability of 80 %; infinite: more than tenfold
    detectable: float | None = None
    further_repeats: int | None = None  # expected number to decide; None: nothing or unknown

    @property
    def separated(self) -> tuple[Standing, ...]:
        return tuple(place for place in self.places if place.is_separated)

    @property
    def not_separated(self) -> tuple[str, ...]:
        """Names of those that may be the fastest, without the leader."""
        others = (place for place in self.places if place.name != self.leader)
        return tuple(place.name for place in others if not place.is_separated)

    @property
    def ties(self) -> tuple[str, ...]:
        """Names of those that are shown to be within the margin of the leader."""
        return tuple(place.name for place in self.places if place.is_tie)

    @property
    def undecided(self) -> tuple[str, ...]:
        """Names of those that are neither separated nor a tie."""
        return tuple(name for name in self.not_separated if name not in self.ties)


def find_fastest(
    speeds: Mapping[str, Belief],
    repeats: float,
    *,
    level: float = 1 - CONFIDENCE,
    margin: float = TIE_MARGIN,
) -> Fastest:
    """Compare configurations of one fit with the fastest of them.

    repeats: the usual number. level: family-wise error. margin: of a tie, as a share of the speed.
    """
    leader = max(speeds, key=lambda name: speeds[name].value)
    behind = {name: speeds[leader] - speed for name, speed in speeds.items() if name != leader}
    units = {name: float(_unit(each.noise())[0]) for name, each in behind.items()}
    distance = {name: each.value / units[name] for name, each in behind.items()}
    near_first = sorted(behind, key=distance.__getitem__)
    order = [speeds[name] for name in (leader, *near_first)]
    critical = _critical_distances(order, level * (1 - RISK_SHARE))
    certain = least_doubts({n: each.doubt(0.0) for n, each in behind.items()}, level * RISK_SHARE)
    limit, most = math.log1p(margin), max(critical, default=0.0)
    places, needed, is_farther_separated = {}, 0.0, True
    for name, bound in zip(reversed(near_first), reversed(critical), strict=True):
        gap, reach = behind[name].value, most * units[name]
        is_farther_separated = is_farther_separated and distance[name] > bound
        is_separated = is_farther_separated and name in certain
        is_separated = is_separated and behind[name].estimate(is_tested=True).low > 0
        ratio = behind[name].estimate(is_tested=is_separated)
        is_tie = not is_separated and max(gap + reach, ratio.high) < limit
        places[name] = Standing(
            name=name, log_ratio=ratio, is_separated=is_separated, is_tie=is_tie
        )
        if not (is_separated or is_tie):
            to_tie = reach / (limit - gap) if gap < limit else math.inf
            needed = max(needed, min(reach / max(gap, 1e-9), to_tie) ** 2)
    places[leader] = Standing(name=leader, log_ratio=Estimate(value=0.0, low=0.0, high=0.0))
    further = max(math.ceil(min(repeats * (needed - 1), _MOST_FURTHER)), 1) if needed else None
    return Fastest(
        leader=leader,
        places=tuple(places[name] for name in speeds),
        detectable=_detectable(list(units.values()), most),
        further_repeats=further,
    )


def differing(
    tests: Mapping[str, Belief], value: float, *, level: float = 1 - CONFIDENCE
) -> set[str]:
    """Return the logarithms of a family that differ from a value. level: of the whole family."""
    noise = holm({n: each.p_value(value) for n, each in tests.items()}, level * (1 - RISK_SHARE))
    return noise & least_doubts({n: t.doubt(value) for n, t in tests.items()}, level * RISK_SHARE)


def reversed_orders(
    pairs: Mapping[str, tuple[Belief, Belief]], *, level: float = 1 - CONFIDENCE
) -> set[str]:
    """Return the pairs whose order is shown to be another one in two places.

    pairs: the logarithms of the same ratio in both. An order is reversed only if both ratios differ
    from one on their sides, so the weaker of the two tests counts, without a correction (R. L.
    Berger, Technometrics 24(4), 1982). level: of the whole family.
    """
    opposed = {name for name, (one, other) in pairs.items() if one.value * other.value < 0}
    noise = {
        name: max(each.p_value(0.0) for each in both) if name in opposed else 1.0
        for name, both in pairs.items()
    }
    doubts = {name: max(each.doubt(0.0) for each in pairs[name]) for name in opposed}
    shown = holm(noise, level * (1 - RISK_SHARE))
    return shown & least_doubts(doubts, level * RISK_SHARE)


def least_doubts(doubts: Mapping[str, float], risk: float) -> set[str]:
    """Return the statements of which all hold with a probability of 1 - risk: the surest first."""
    surest_first = sorted(doubts, key=doubts.__getitem__)
    sums = itertools.accumulate(doubts[name] for name in surest_first)
    return {name for name, total in zip(surest_first, sums, strict=True) if total <= risk}


def _critical_distances(speeds: list[Belief], level: float) -> list[float]:
    """Return the distance that no pair of the first two, three, … equal ones exceeds.

    Infinite if the level is below the resolution of the draws.
    """
    normal = normal_draws(len(speeds))
    errors = np.stack([np.sqrt(s.variances) * z for s, z in zip(speeds, normal, strict=True)])
    largest, found = np.zeros(errors.shape[1]), []
    for number in range(1, len(speeds)):
        distances = np.abs(errors[:number] - errors[number])
        largest = np.maximum(largest, (distances / _unit(distances)).max(axis=0))
        is_drawn = level * len(largest) >= 1
        found.append(float(np.quantile(largest, 1 - level)) if is_drawn else math.inf)
    return found


def _unit(noise: Floats) -> Floats:
    """Return the deviation of a normal distribution with the same far tail, along the last axis.

    A noise that is perhaps large has a long tail, which must not decide for all others.
    """
    found: Floats = np.quantile(np.abs(noise), _TAIL, axis=-1, keepdims=True) / _TAIL_DEVIATIONS
    return found


def _detectable(units: list[float], critical: float) -> float | None:
    """Return the difference from the fastest that is found with a probability of 80 %."""
    if not units:
        return None
    logarithm = (critical + FOUND_QUANTILE) * float(np.median(units))
    return math.expm1(logarithm) if logarithm < _MOST_DETECTABLE else math.inf
