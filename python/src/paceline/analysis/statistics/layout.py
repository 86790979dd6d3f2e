"""The configurations of one run: logarithms of speeds by configuration and repeat, and their noise.

Model: log speed = configuration + repeat + noise. All configurations of a repeat run one after
another, so what they share in it cancels. Least squares give the configurations, also if some
repeats are missing. Without missing repeats the estimates are the means over the repeats, and the
ratio of two configurations is the ratio of their geometric means.

Noise: the repeats of each configuration are compared with the rest of the run, which gives each a
variance of its own. Intervals of ratios use these. One variance for all would make the interval of
a noisier configuration far too narrow, and three repeats do not tell who is noisier. Tests of many
configurations at once need more degrees of freedom. They use a variance that the configurations
share (the core), or the own one, weighted by the probability that the configuration is noisier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import Estimate, estimate, satterthwaite

# The core leaves out configurations that the test rejects at this level, so that they do not
# enlarge the variance of the others.
_CORE_LEVEL = 0.01
_LEAST_CORE = 3
# Probability that a configuration is noisier, before its repeats are seen: 6 / configurations^1.5.
# It is a compromise between false separations and power, chosen by simulation
# (python/benchmarks/statistics_study.py). The variance of such a configuration is 2 to 200 times
# as large, equally likely in logarithms.
_NOISIER_SCALE, _NOISIER_POWER, _MOST_PROBABLE = 6.0, 1.5, 0.5
_FACTORS = np.geomspace(2.0, 200.0, 16)
# Of the square of the largest value: below it, differences are rounding.
_ROUNDING = 1e-24


def values_table(values: Mapping[str, Mapping[int, float]]) -> NDArray[np.float64]:
    """Return values by configuration and repeat as a table; NaN where a repeat is missing.

    Rows are in the order of the mapping.
    """
    repeats = sorted({repeat for found in values.values() for repeat in found})
    return np.array(
        [[found.get(repeat, math.nan) for repeat in repeats] for found in values.values()]
    ).reshape(len(values), len(repeats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The fitted configurations of one run. Arrays are indexed by configuration.

    Several groups: configurations of different groups have no repeat in common, also not through
    others, and cannot be compared.
    """

    names: tuple[str, ...]
    log_means: NDArray[np.float64]  # adjusted for missing repeats; NaN without repeats
    repeats: NDArray[np.int64]  # measured, of each
    groups: NDArray[np.int64]
    variance: float  # of one repeat of the core
    degrees: float  # of freedom of `variance`; 0: noise is unknown
    own_variances: NDArray[np.float64]
    own_degrees: NDArray[np.float64]
    has_own: NDArray[np.bool_]  # the own variance is known, and intervals use it
    noisier: NDArray[np.float64]  # probability that the configuration is noisier than the core
    # The error of a log mean is a weighted sum of independent errors. Shape (configurations,
    # errors); each error belongs to one configuration and has its variance.
    error_weights: NDArray[np.float64]
    error_of: NDArray[np.int64]
    repeat_variance: float  # of what all share in a repeat, with the noise of its estimate
    repeat_degrees: float

    def squared_weights(
        self, first: NDArray[np.int64], second: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the squared weights of differences of pairs, added by configuration.

        Returns shape (pairs, configurations): the factors of the variances of the configurations.
        """
        squares = (self.error_weights[first] - self.error_weights[second]) ** 2
        of_configuration = self.error_of[:, None] == np.arange(len(self.log_means))
        added: NDArray[np.float64] = squares @ of_configuration.astype(float)
        return added

    def is_comparable(self, first: int, second: int) -> bool:
        return bool(self.groups[first] == self.groups[second] >= 0)


def fit_layout(log_speeds: NDArray[np.float64], names: Sequence[str] | None = None) -> Layout:
    """Fit configurations and repeats, and estimate the noise.

    log_speeds: shape (configurations, repeats), NaN where a repeat is missing. names: of the
    configurations; None: their numbers.
    """
    known = ~np.isnan(log_speeds)
    values = np.where(known, log_speeds, 0.0)
    counts = known.sum(axis=1)
    groups = _groups(known)
    weights, effects = _least_squares(log_speeds, known, groups)
    log_means = np.where(counts > 0, weights @ log_speeds[known], np.nan)
    error_of = np.nonzero(known)[0]
    if known.all():  # what the repeats share cancels in every difference
        weights = np.eye(len(known)) / math.sqrt(max(known.shape[1], 1))
        error_of = np.arange(len(known))
    noise = _Noise(values, known)
    return Layout(
        names=tuple(map(str, range(len(counts))) if names is None else names),
        log_means=log_means,
        repeats=counts,
        groups=groups,
        variance=noise.variance,
        degrees=noise.degrees,
        own_variances=noise.own_variances,
        own_degrees=noise.own_degrees,
        has_own=noise.is_testable,
        noisier=noise.probabilities(),
        error_weights=weights,
        error_of=error_of,
        repeat_variance=float(np.var(effects, ddof=1)) if len(effects) > 1 else 0.0,
        repeat_degrees=float(max(len(effects) - 1, 0)),
    )


def log_ratio(layout: Layout, first: int, second: int) -> Estimate | None:
    """Return log(first / second) with its interval; None if they cannot be compared.

    The bounds are infinite if the noise is unknown.
    """
    if not layout.is_comparable(first, second):
        return None
    value = float(layout.log_means[first] - layout.log_means[second])
    variance, degrees = _variance_of_difference(layout, first, second)
    return estimate(value, math.sqrt(variance), degrees)


def log_speed(layout: Layout, index: int) -> Estimate | None:
    """Return the absolute figure of a configuration; None if it has no repeats.

    Its interval contains the whole spread between repeats, also what all configurations share.
    """
    count = int(layout.repeats[index])
    if not count:
        return None
    own, shares = bool(layout.has_own[index]), 1 - 1 / len(layout.log_means)
    noise = layout.own_variances[index] if own else shares * layout.variance
    degrees = layout.own_degrees[index] if own else layout.degrees
    value = float(layout.log_means[index])
    # The only configuration with repeats: nothing tells its noise from that of the repeats.
    if count > 1 and int((layout.repeats > 1).sum()) == 1:
        error = math.sqrt(layout.repeat_variance / count)
        return estimate(value, error, layout.repeat_degrees)
    if degrees <= 0 or layout.repeat_degrees <= 0:
        return estimate(value, math.inf, 0)
    parts = np.array([layout.repeat_variance, noise]) / count
    total_degrees = satterthwaite(parts, np.array([layout.repeat_degrees, degrees]))
    return estimate(value, math.sqrt(float(parts.sum())), float(total_degrees))


def _variance_of_difference(layout: Layout, first: int, second: int) -> tuple[float, float]:
    """Return the variance of the difference and its degrees of freedom."""
    squares = layout.squared_weights(np.array([first]), np.array([second]))[0]
    own = layout.has_own & (squares > 0)
    parts = [layout.variance * float(squares[~own].sum()), *(layout.own_variances * squares)[own]]
    degrees = [layout.degrees, *layout.own_degrees[own]]
    used = [(part, free) for part, free in zip(parts, degrees, strict=True) if free > 0]
    if layout.degrees <= 0 or not used:
        return math.inf, 0.0
    variances, frees = (np.array(column) for column in zip(*used, strict=True))
    return float(variances.sum()), float(satterthwaite(variances, frees))


class _Noise:
    """Variances of configurations from nested least-squares fits of the layout."""

    def __init__(self, values: NDArray[np.float64], known: NDArray[np.bool_]) -> None:
        """values: 0 where they are missing."""
        counts = np.maximum(known.sum(axis=1), 1)
        centred = np.where(known, values - (values.sum(axis=1) / counts)[:, None], 0.0)
        self._squares = (centred**2).sum(axis=1)
        self._free = known.sum(axis=1) - (known.any(axis=1))
        self._sums = centred
        present = known.astype(float)
        diagonal = present[:, :, None] * np.eye(known.shape[1])
        self._normal = diagonal - present[:, :, None] * present[:, None, :] / counts[:, None, None]
        self._floor = _ROUNDING * float(np.max(values**2, initial=0.0))
        core = known.sum(axis=1) > 1
        while True:
            self._test(core)
            left_out = self._outlier(core)
            if left_out is None:
                break
            core[left_out] = False

    def _is_noisier(self, level: float) -> NDArray[np.bool_]:
        with np.errstate(invalid="ignore"):
            p_values = scipy.special.fdtrc(self.own_degrees, self._rest_degrees, self._ratio)
        found: NDArray[np.bool_] = self.is_testable & (p_values < level)
        return found

    def probabilities(self) -> NDArray[np.float64]:
        """Return the probability of each configuration that it is noisier, by Bayes' rule."""
        size = len(self._ratio)
        prior = min(_NOISIER_SCALE / max(size, 1) ** _NOISIER_POWER, _MOST_PROBABLE)
        factors = np.concatenate([[1.0], _FACTORS])
        weights = np.concatenate([[1 - prior], np.full(len(_FACTORS), prior / len(_FACTORS))])
        free = np.maximum(self.own_degrees, 1.0)[:, None]
        rest = np.maximum(self._rest_degrees, 1.0)[:, None]
        scaled = np.maximum(self._ratio, 1e-9)[:, None] / factors
        log_density = -0.5 * free * np.log(factors)
        log_density = log_density - 0.5 * (free + rest) * np.log1p(free * scaled / rest)
        posterior = weights * np.exp(log_density - log_density.max(axis=1, keepdims=True))
        found: NDArray[np.float64] = posterior[:, 1:].sum(axis=1) / posterior.sum(axis=1)
        return np.where(self.is_testable, found, 0.0)

    def _test(self, core: NDArray[np.bool_]) -> None:
        """Compare each configuration with the rest of the core."""
        inside = core[:, None].astype(float)
        normal = np.tensordot(core.astype(float), self._normal, axes=1)
        sums, squares = (inside * self._sums).sum(axis=0), float(self._squares[core].sum())
        free = float(self._free[core].sum())
        left, left_free = _residuals(
            normal[None], sums[None], np.array([squares]), np.array([free])
        )
        self.degrees = float(left_free[0])
        self.variance = float(left[0]) / max(self.degrees, 1.0)
        with_it = ~core[:, None, None] * self._normal
        without = core[:, None, None] * self._normal
        more = ~core[:, None] * self._sums
        less = core[:, None] * self._sums
        outside, in_core = self._squares * ~core, self._squares * core
        whole, whole_free = _residuals(
            normal + with_it, sums + more, squares + outside, free + self._free * ~core
        )
        rest, rest_free = _residuals(
            normal - without, sums - less, squares - in_core, free - self._free * core
        )
        self.own_degrees = whole_free - rest_free
        self._rest_degrees = rest_free
        floor = self._floor
        extra = np.maximum(whole - rest, 0.0)
        self.own_variances = extra / np.maximum(self.own_degrees, 1.0)
        self.is_testable = (self.own_degrees > 0) & (rest_free > 0)
        others = np.maximum(rest / np.maximum(rest_free, 1.0), floor)
        self._ratio = self.own_variances / np.maximum(others, 1e-300)

    def _outlier(self, core: NDArray[np.bool_]) -> int | None:
        size = int(core.sum())
        if size <= max(_LEAST_CORE, len(core) // 2):
            return None
        candidates = core & self._is_noisier(_CORE_LEVEL / size)
        if not candidates.any():
            return None
        return int(np.argmax(np.where(candidates, self._ratio, -1.0)))


def _residuals(
    normal: NDArray[np.float64],
    sums: NDArray[np.float64],
    squares: NDArray[np.float64],
    free: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the residual sum of squares of fits of the repeats, and its degrees of freedom.

    Configurations are already eliminated. normal: normal matrices, shape (fits, repeats, repeats).
    sums: right-hand sides. squares, free: sum of squares and degrees of freedom before the fit.
    """
    if not normal.shape[1]:
        return squares, free
    sizes, vectors = np.linalg.eigh(normal)
    is_used = sizes > 1e-9 * max(float(normal.shape[1]), float(np.max(sizes, initial=0.0)))
    projected = np.einsum("fri,fr->fi", vectors, sums)
    explained = np.where(is_used, projected**2 / np.where(is_used, sizes, 1.0), 0.0).sum(axis=1)
    return np.maximum(squares - explained, 0.0), free - is_used.sum(axis=1)


def _groups(known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number the sets of configurations that are connected by common repeats; -1: no repeats."""
    if known.all():
        return np.zeros(len(known), dtype=np.int64)
    graph = scipy.sparse.csr_array(known.astype(int) @ known.T.astype(int))
    labels = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]
    return np.where(known.any(axis=1), labels, -1)


def _least_squares(
    log_speeds: NDArray[np.float64], known: NDArray[np.bool_], groups: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the log means as weights of the known values, and the effects of the repeats.

    A log mean is adjusted to the repeats of all configurations of its group.
    """
    configuration, repeat = np.nonzero(known)
    if known.all():
        weights = (configuration[None, :] == np.arange(len(known))[:, None]) / known.shape[1]
        return weights, log_speeds.mean(axis=0)
    size = len(known)
    design = np.zeros((len(configuration), size + known.shape[1]))
    design[np.arange(len(configuration)), configuration] = 1.0
    design[np.arange(len(configuration)), size + repeat] = 1.0
    solution = np.linalg.pinv(design)
    weights = solution[:size].copy()
    for group in np.unique(groups[groups >= 0]):
        members = groups == group
        columns = np.flatnonzero(known[members].any(axis=0))
        weights[members] += solution[size + columns].mean(axis=0)
    measured = known.any(axis=0)
    return weights, (solution[size:] @ log_speeds[known])[measured]
