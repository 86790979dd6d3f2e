"""Levels for testing after every repeat (`repeats = "auto"`).

Testing after every repeat at 5 % would find a difference between equal configurations far too
often. Therefore the 5 % are spent over the looks: after k of at most K repeats, 5 % x (k / K)^2
may have been spent (alpha spending: K. K. G. Lan and D. L. DeMets, Biometrika 70(3), 1983; power
family: K. Kim and D. L. DeMets, Biometrika 74(1), 1987). The level of each look follows from the
probability of reaching it without a significant difference, by the recursion of P. Armitage, C. K.
McPherson and B. C. Rowe (Journal of the Royal Statistical Society A 132(2), 1969). It is then the
family-wise level of `find_fastest`. Using the levels of normal statistics for other tests is an
approximation (S. J. Pocock, Biometrika 64(2), 1977).

A run is decided as soon as `find_fastest(layout, level=levels(most)[repeats]).undecided` is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import numpy as np
import scipy
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import CONFIDENCE

FIRST_LOOK = 2  # repeats: with one, the noise between runs is unknown
_POWER = 2.0
_POINTS = 100  # of Gauss-Legendre, at which densities are integrated
_REACH = 8.0  # standard deviations that the grid covers at most


@cache
def levels(most_repeats: int) -> Mapping[int, float]:
    """Return the two-sided level of the test after each number of repeats, from FIRST_LOOK on.

    The probability that any of these looks at a normal statistic of equal configurations is
    significant is 5 %.
    """
    found: dict[int, float] = {}
    spent, before = 0.0, 0
    grid, density = np.zeros(1), np.ones(1)  # of the sum of all differences, where no look decided
    weight = np.ones(1)
    nodes, weights = scipy.special.roots_legendre(_POINTS)
    for repeats in range(FIRST_LOOK, most_repeats + 1):
        allowed = (1 - CONFIDENCE) * (repeats / most_repeats) ** _POWER
        step = np.sqrt(repeats - before)
        mass = density * weight
        bound = _bound(grid, mass, float(step), allowed - spent, repeats)
        found[repeats] = float(2 * scipy.special.ndtr(-bound / np.sqrt(repeats)))
        distance = (bound * nodes[:, None] - grid[None, :]) / step
        density = np.exp(-0.5 * distance**2) @ mass / (step * np.sqrt(2 * np.pi))
        grid, weight = bound * nodes, bound * weights
        before, spent = repeats, allowed
    return MappingProxyType(found)


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
