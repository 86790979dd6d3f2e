"""Decide after each repeat whether the ranking needs another one (`repeats = "auto"`).

Testing after every repeat at 5 % would find a difference between equal configurations far too
often. Therefore the 5 % are spent over the looks: after k of at most K repeats, 5 % x (k / K)^2
may have been spent (alpha spending: K. K. G. Lan and D. L. DeMets, Biometrika 70(3), 1983; power
family: K. Kim and D. L. DeMets, Biometrika 74(1), 1987). The level of each look follows from the
probability of reaching it without a significant difference, by the recursion of P. Armitage, C. K.
McPherson and B. C. Rowe (Journal of the Royal Statistical Society A 132(2), 1969). It is then the
level of the t-tests of all pairs, with Holm's correction. Using the levels of normal statistics for
t-tests is an approximation (S. J. Pocock, Biometrika 64(2), 1977).

In simulations with noise between and within repeats at most 5 % of the decisions between equal
configurations are wrong: tests/unit/analysis/test_repeats.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy

from paceline.analysis.statistics.noise import CONFIDENCE, run_noise
from paceline.analysis.statistics.pairwise import Pairwise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.analysis.statistics.resampling import Series

FIRST_LOOK = 2  # repeats: with one, the noise between runs is unknown
_POWER = 2.0
_POINTS = 401  # of the grid on which densities are integrated
_REACH = 8.0  # standard deviations that the grid covers at most


def levels(most_repeats: int, level: float = 1 - CONFIDENCE) -> dict[int, float]:
    """Return the two-sided level of the test after each number of repeats, from FIRST_LOOK on.

    The probability that any of these looks at a normal statistic of equal configurations is
    significant is `level`.
    """
    found: dict[int, float] = {}
    spent, before = 0.0, 0
    grid, density = np.zeros(1), np.ones(1)  # of the sum of all differences, where no look decided
    weight = np.ones(1)
    for repeats in range(FIRST_LOOK, most_repeats + 1):
        allowed = level * (repeats / most_repeats) ** _POWER
        step = np.sqrt(repeats - before)
        mass = density * weight
        bound = _bound(grid, mass, float(step), allowed - spent, repeats)
        found[repeats] = float(2 * scipy.special.ndtr(-bound / np.sqrt(repeats)))
        new = np.linspace(-bound, bound, _POINTS)
        distance = (new[:, None] - grid[None, :]) / step
        density = np.exp(-0.5 * distance**2) @ mass / (step * np.sqrt(2 * np.pi))
        weight = _simpson(new)
        grid, before, spent = new, repeats, allowed
    return found


def undecided(
    rates: Mapping[str, Mapping[int, Series]], *, level: float, tie_margin: float
) -> tuple[str, ...]:
    """Return the configurations whose place in the ranking of one workload is not decided.

    It is decided if a configuration is either significantly slower than the fastest one, or shown
    to be within the margin of it. rates: of the configurations that may be ranked. level: of the
    tests.
    """
    if not rates:
        return ()
    leader = max(rates, key=lambda name: np.median([s.log_median for s in rates[name].values()]))
    pairs = Pairwise(list(rates), rates, run_noise(rates), level)
    return tuple(
        name
        for name in rates
        if name != leader
        and pairs.is_tie(leader, name)
        and not pairs.is_within(leader, name, tie_margin)
    )


def _bound(
    grid: NDArray[np.float64],
    mass: NDArray[np.float64],
    step: float,
    probability: float,
    repeats: int,
) -> float:
    """Return the bound that the sum exceeds at this look with the given probability."""

    def excess(bound: float) -> float:
        sides = [(grid - bound) / step, (-grid - bound) / step]
        return float(scipy.special.ndtr(sides).sum(axis=0) @ mass) - probability

    return float(scipy.optimize.brentq(excess, 0.0, _REACH * np.sqrt(repeats)))


def _simpson(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights of Simpson's rule on an odd number of equidistant points."""
    weights = np.full(len(grid), 2.0)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    result: NDArray[np.float64] = weights * (grid[1] - grid[0]) / 3
    return result
