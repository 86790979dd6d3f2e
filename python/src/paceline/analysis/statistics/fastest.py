"""Which configurations of a run are separated from the fastest one, and which tie with it.

Hypothesis of a configuration: it is as fast as the fastest. Its statistic is the largest distance
to any other configuration, in units of the noise of the pair. The hypotheses are tested together,
step by step: what is rejected first leaves a smaller family for the rest (P. H. Westfall, S. S.
Young, Resampling-Based Multiple Testing, 1993). The joint distribution of all statistics, a
multivariate t, is drawn from the estimated variances and their uncertainty. At most 5 % of the runs
report any false separation. Upper bounds of the distance behind the leader hold together, too
(C. W. Dunnett, Journal of the American Statistical Association 50, 1955).

It is unknown whether a configuration with few repeats is noisier than the others. The draws use its
own variance with the probability that it is, otherwise the common one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import CONFIDENCE, Estimate, detectable_difference
from paceline.analysis.statistics.layout import Layout, log_ratio

TIE_MARGIN = 0.03
_SEED = 20220131
_MOST_DRAWS, _MOST_ELEMENTS = 4000, 3_000_000
_BISECTIONS = 6
_LEAST_ERROR = 1e-12  # relative to a logarithm of 1: smaller differences are rounding
_MOST_DETECTABLE = math.log(10)
_MOST_FURTHER = 1000  # repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One configuration in comparison with the fastest measured one.

    Neither separated nor a tie: undecided.
    """

    name: str
    log_ratio: Estimate | None  # fastest / this one, 95 %; None: no repeats in common
    is_separated: bool
    is_tie: bool  # shown to be at most the margin behind
    log_most_behind: float  # upper bound of its distance behind the leader, family-wise


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
    layout: Layout,
    candidates: Sequence[int] | None = None,
    *,
    level: float = 1 - CONFIDENCE,
    margin: float = TIE_MARGIN,
) -> Fastest:
    """Compare the candidates with the fastest of them.

    candidates: configurations that may be ranked; the noise is that of all. level: family-wise
    error. margin: of a tie, as a share of the speed.
    """
    every = range(len(layout.log_means)) if candidates is None else candidates
    chosen = [index for index in every if layout.repeats[index]]
    if not chosen:
        return Fastest()
    leader = max(chosen, key=lambda index: float(layout.log_means[index]))
    compared = [index for index in chosen if layout.is_comparable(leader, index)]
    tests = None
    if layout.degrees > 0 and len(compared) > 1:
        tests = _Tests(layout, np.array(compared), level)
    places = {n: _place(layout, tests, leader, n, level, margin) for n in chosen}
    return Fastest(
        leader=layout.names[leader],
        places=tuple(places.values()),
        detectable=None if tests is None else tests.detectable(compared.index(leader)),
        further_repeats=None if tests is None else _further(layout, tests, places, leader, margin),
    )


def _place(
    layout: Layout, tests: _Tests | None, leader: int, index: int, level: float, margin: float
) -> Standing:
    ratio = log_ratio(layout, leader, index)
    p_value, most_behind = 1.0, math.inf
    if tests is not None and ratio is not None:
        position = tests.position(index)
        p_value, most_behind = float(tests.p_values[position]), float(tests.bounds[position])
    is_other = index != leader and ratio is not None
    limit = math.log1p(margin)
    return Standing(
        name=layout.names[index],
        log_ratio=ratio,
        # The second condition keeps the decision in agreement with the interval that is shown.
        is_separated=is_other and p_value <= level and ratio is not None and ratio.low > 0,
        is_tie=is_other and ratio is not None and max(most_behind, ratio.high) < limit,
        log_most_behind=most_behind,
    )


def _further(
    layout: Layout, tests: _Tests, places: Mapping[int, Standing], leader: int, margin: float
) -> int | None:
    """Return the repeats that would decide all places if the measured distances are true."""
    needed = 0.0
    now = float(np.median(layout.repeats[[*places]]))
    limit = math.log1p(margin)
    for index, place in places.items():
        if index == leader or place.is_separated or place.is_tie or place.log_ratio is None:
            continue
        gap = max(place.log_ratio.value, 1e-9)
        to_separate = tests.critical * tests.scale(leader, index) / gap
        width = max(place.log_most_behind, place.log_ratio.high) - gap
        to_tie = width / (limit - gap) if gap < limit else math.inf
        needed = max(needed, now * min(to_separate, to_tie) ** 2)
    if needed == 0:
        return None
    return min(max(math.ceil(needed - now), 1), _MOST_FURTHER)


class _Tests:
    """Joint tests of the hypotheses that each configuration is as fast as the fastest.

    Arrays are indexed by position in `compared`.
    """

    def __init__(self, layout: Layout, compared: NDArray[np.int64], level: float) -> None:
        self._compared = compared
        self._pairs = _Pairs(layout, compared, level)
        scales = self._pairs.scales
        means = layout.log_means[compared]
        statistics = ((means[:, None] - means[None, :]) / scales).max(axis=0)
        drawn = _largest_distances(_drawn_errors(layout, compared), scales)
        self.p_values = _step_down(statistics, drawn)
        self.critical = float(np.quantile(drawn.max(axis=1), 1 - level))
        leader = int(np.argmax(means))
        quantile = float(np.quantile(drawn[:, leader], 1 - level))
        self.bounds = means[leader] - means + quantile * scales[leader]

    def position(self, index: int) -> int:
        return int(np.flatnonzero(self._compared == index)[0])

    def scale(self, first: int, second: int) -> float:
        return float(self._pairs.scales[self.position(first), self.position(second)])

    def detectable(self, leader: int) -> float:
        """Return the difference from the fastest that is found with a probability of 80 %."""
        others = np.arange(len(self._compared)) != leader
        limit = self.critical * float(np.median(self._pairs.scales[leader, others]))
        error = float(np.median(self._pairs.errors[leader, others]))
        logarithm = detectable_difference(error, limit)
        return math.expm1(logarithm) if logarithm < _MOST_DETECTABLE else math.inf


class _Pairs:
    """Errors of all pairs: a mixture of Student's t, because it is unknown who is noisier."""

    def __init__(self, layout: Layout, compared: NDArray[np.int64], level: float) -> None:
        size = len(compared)
        self._rows, self._columns = np.triu_indices(size, 1)
        first, second = compared[self._rows], compared[self._columns]
        squares = layout.squared_weights(first, second)
        pairs = np.arange(len(first))
        sides = squares[pairs, first], squares[pairs, second]
        rest = squares.sum(axis=1) - sides[0] - sides[1]
        errors, degrees, chances = [], [], []
        for is_first, is_second in ((0, 0), (0, 1), (1, 0), (1, 1)):
            parts = np.stack(
                [
                    layout.variance
                    * (rest + (1 - is_first) * sides[0] + (1 - is_second) * sides[1]),
                    is_first * layout.own_variances[first] * sides[0],
                    is_second * layout.own_variances[second] * sides[1],
                ]
            )
            free = np.stack(
                [
                    np.full(len(first), layout.degrees),
                    np.maximum(layout.own_degrees[first], 1.0),
                    np.maximum(layout.own_degrees[second], 1.0),
                ]
            )
            total, sums = parts.sum(axis=0), (parts**2 / free).sum(axis=0)
            errors.append(np.maximum(np.sqrt(total), _LEAST_ERROR))
            degrees.append(np.where(sums > 0, total**2 / np.where(sums > 0, sums, 1.0), free[0]))
            chances.append(
                np.abs(1 - is_first - layout.noisier[first])
                * np.abs(1 - is_second - layout.noisier[second])
            )
        self._errors, self._degrees = np.array(errors), np.array(degrees)
        self._chances = np.array(chances)
        self.errors = self._square(self._errors[0], size)
        self.scales = self._square(self._quantiles(level / size), size)
        np.fill_diagonal(self.scales, 1.0)

    def _square(self, of_pairs: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        square = np.zeros((size, size))
        square[self._rows, self._columns] = of_pairs
        square[self._columns, self._rows] = of_pairs
        return square

    def _quantiles(self, probability: float) -> NDArray[np.float64]:
        """Return the distances that the errors exceed with this two-sided probability, roughly.

        Exact values are not needed: they are the units of the statistics only.
        """
        bounds = -scipy.special.stdtrit(self._degrees, probability / 2) * self._errors
        low, high = np.log(bounds.min(axis=0)), np.log(bounds.max(axis=0))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            tails = 2 * scipy.special.stdtr(self._degrees, -np.exp(middle) / self._errors)
            is_low = (self._chances * tails).sum(axis=0) > probability
            low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
        found: NDArray[np.float64] = np.exp((low + high) / 2)
        return found


@lru_cache(maxsize=4)
def _standard_draws(
    draws: int, errors: int, degrees: float, own_degrees: tuple[float, ...]
) -> tuple[NDArray[np.float64], ...]:
    """Return standard random variables by draw; equal arguments give equal draws.

    Normal ones of the errors; chi-square over degrees of freedom, common to all and of each
    configuration; uniform ones of each configuration.
    """
    generator = np.random.default_rng(_SEED)
    shape = draws, len(own_degrees)
    return (
        generator.standard_normal((draws, errors)),
        generator.chisquare(degrees, (draws, 1)) / degrees,
        generator.chisquare(own_degrees, shape) / np.array(own_degrees),
        generator.random(shape),
    )


def _drawn_errors(layout: Layout, compared: NDArray[np.int64]) -> NDArray[np.float64]:
    """Draw the errors of the log means of the compared, shape (draws, compared)."""
    count = min(_MOST_DRAWS, _MOST_ELEMENTS // len(compared) ** 2)
    own_degrees = tuple(np.maximum(layout.own_degrees, 1.0).tolist())
    normal, common, own, uniform = _standard_draws(
        count, len(layout.error_of), layout.degrees, own_degrees
    )
    is_noisier = uniform < layout.noisier
    variances = np.where(is_noisier, layout.own_variances / own, layout.variance / common)
    errors = normal * np.sqrt(variances)[:, layout.error_of]
    drawn: NDArray[np.float64] = errors @ layout.error_weights[compared].T
    return drawn


def _largest_distances(
    errors: NDArray[np.float64], scales: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the largest scaled distance of each configuration to another, by draw."""
    largest = np.zeros_like(errors)
    for column in range(errors.shape[1]):
        distances = (errors - errors[:, column, None]) / scales[column]
        largest[:, column] = distances.max(axis=1)
    return largest


def _step_down(statistics: NDArray[np.float64], drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return p-values corrected for the family: each is tested with those of smaller statistics."""
    order = np.argsort(statistics, kind="stable")
    family = np.maximum.accumulate(drawn[:, order], axis=1)
    exceeded = (family >= statistics[order] - _LEAST_ERROR).mean(axis=0)
    p_values = np.empty(len(order))
    p_values[order] = np.maximum.accumulate(exceeded[::-1])[::-1]
    return p_values
