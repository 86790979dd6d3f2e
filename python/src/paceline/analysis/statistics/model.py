"""The model of the repeats of a run, of which every interval and comparison is a statement.

    log speed of a repeat = configuration + repeat + noise - disturbance

Other work on the machine can only slow a repeat. So the fastest n of R repeats of a configuration
are undisturbed and the others are slower, by more than noise; n is unknown. Or the slower ones are
a group of their own, because the configuration has two speeds. How large the noise of each
configuration is, and which share of the repeats is disturbed, is unknown, too; all configurations
together tell it. The unknowns are summed over grids. docs/explanation/statistics.md derives the
formulas and says what breaks the assumption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import scipy
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import CONFIDENCE, Estimate

Floats = NDArray[np.float64]

# Values of the unknowns, in logarithms of speeds, which have no unit.
_NOISE = np.geomspace(3e-4, 1.0, 24)  # standard deviation of a repeat of one configuration
_USUAL = np.geomspace(1e-3, 0.3, 16)  # the usual one of the run
_SPREADS = np.array([0.1, 0.4])  # of the logarithm of the noise over configurations
_SHARES = np.array([0.003, 0.01, 0.03, 0.08, 0.16, 0.25, 0.4])  # of disturbed repeats
# Most repeats differ by 0.3 to 7 %: a log-normal prior of the usual noise.
_USUAL_CENTRE, _USUAL_SPREAD = 0.015, 1.5
# The noise of a configuration may have nothing to do with that of the others, with one of these
# probabilities, which is learned. Few repeats cannot show it, so in intervals it counts more. 30 in
# place of 12: intervals of a configuration with four times the noise contain the truth in 93 % of
# runs, not in 92, but beside 20 % of disturbed repeats 5 % are found in 48 % of runs, not in 63.
_OTHER_NOISES, _OTHER_FACTORS = (0.02, 0.25), (2.5, 12.0)
_OTHER_UNSEEN, _OTHER_MOST = 12.0, 0.4  # 12 / repeats^3, at most 0.4
_BESIDE_LOAD = 0.8  # probability that a repeat beside other work is disturbed
_SCALE = 0.5  # of the gamma distribution of shape 2 of a disturbance; its mean is twice that
_TWO_SPEEDS = 0.05  # probability that a configuration has two speeds
_COUNTS_AS_TWO = 0.06  # probability of two speeds from which an interval contains both
_SLOW, _FAST = 2, 6  # beta distribution of the share of its slow repeats

FOUND_QUANTILE = 1.1  # deviations: 0.84 if the noise were known, more because each run has its own
_POINTS, _PER_POINT = 40, 50
COMPONENTS = _POINTS * _PER_POINT
_QUANTILES = (np.arange(COMPONENTS) + 0.5) / COMPONENTS
_SEED = 20220131
_LEAST = (_NOISE[0] / 10) ** 2  # variance, so that nothing is divided by zero
_ROUNDS = 12  # of the fit of what all share in a repeat
_SLOW_REPEAT = 3.0  # standard deviations below the others, from which a repeat counts little there


@dataclass(frozen=True, slots=True)
class Belief:
    """A logarithm of a speed or ratio: a mixture of equally probable normal distributions.

    Components with the same index belong to the same noise of the run. value: the estimate.
    seen: the centres for tests. They are of the faster of two speeds, and infinite where no repeat
    was undisturbed: then the speed may be any above the measured ones.
    """

    value: float
    centres: Floats
    variances: Floats
    seen: Floats

    def __sub__(self, other: Belief) -> Belief:
        with np.errstate(invalid="ignore"):  # nothing is known if neither was seen
            seen = self.seen - other.seen
        return Belief(
            self.value - other.value,
            self.centres - other.centres,
            self.variances + other.variances,
            seen,
        )

    def of_another_run(self) -> Belief:
        """Return the same in another order: the noise of two runs has nothing in common."""
        order = np.random.default_rng(_SEED + 1).permutation(COMPONENTS)
        parts = (part[order] for part in (self.centres, self.variances, self.seen))
        return Belief(self.value, *parts)

    def widened(self, shared: SharedSpread) -> Belief:
        return replace(self, variances=self.variances + shared.draws())

    @property
    def has_noise(self) -> bool:
        return bool(np.isfinite(self.variances).all())

    @property
    def deviation(self) -> float:
        """The noise of the estimate, if it is known which repeats were disturbed."""
        return float(np.sqrt(self.variances).mean())

    def noise(self) -> Floats:
        """Draw the error of the estimate if it is known which repeats were disturbed."""
        drawn: Floats = np.sqrt(self.variances) * normal_draws(1)[0]
        return drawn

    def draws(self) -> Floats:
        drawn: Floats = self.centres + self.noise()
        return drawn

    def estimate(self, *, is_tested: bool = False) -> Estimate:
        """Return the estimate. is_tested: a test separated it, so only what was seen counts."""
        if not self.has_noise:
            return Estimate(value=self.value)
        tail = (1 - CONFIDENCE) / 2
        drawn = (self.seen if is_tested else self.centres) + self.noise()
        bounds = np.quantile(drawn, [tail, 1 - tail], method="inverted_cdf")
        low, high = bounds.tolist()
        return Estimate(value=self.value, low=min(low, self.value), high=max(high, self.value))

    def p_value(self, value: float) -> float:
        """Test that the logarithm has this value, two-sided, if the disturbed repeats are known."""
        distances = abs(value - self.value) / np.sqrt(self.variances)
        return 2 * float(scipy.special.ndtr(-distances).mean())

    def doubt(self, value: float) -> float:
        """Return the probability that the estimate is on the wrong side of a value, without noise.

        The reason is a wrong conclusion about which repeats were disturbed.
        """
        is_right = self.seen > value if self.value > value else self.seen < value
        return 1 - float(is_right.mean())

    def detectable_loss(self, level: float, risk: float) -> float:
        """Return how far below a value the test at this level finds it with a probability of 80 %.

        Infinite if all repeats were perhaps disturbed, with a probability above the risk.
        """
        noise = float(np.quantile(np.abs(self.noise()), 1 - level))
        beyond = float(np.quantile(self.seen, 1 - risk, method="inverted_cdf")) - self.value
        return max(noise, beyond) + FOUND_QUANTILE * self.deviation


def unknown(value: float) -> Belief:
    """Return a value of which the noise is unknown."""
    centres, variances = np.full(COMPONENTS, value), np.full(COMPONENTS, math.inf)
    return Belief(value, centres, variances, centres)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpread:
    """The variance of what all configurations share, of one repeat or of means over repeats."""

    variance: float
    degrees: float

    def over(self, repeats: int) -> SharedSpread:
        return replace(self, variance=self.variance / repeats)

    def __add__(self, other: SharedSpread) -> SharedSpread:
        """Return that of the difference of two runs (F. E. Satterthwaite, 1946)."""
        total = self.variance + other.variance
        parts = self.variance**2 / self.degrees + other.variance**2 / other.degrees
        return SharedSpread(variance=total, degrees=total**2 / parts)

    def draws(self) -> Floats:
        """Return equally probable variances."""
        quantiles = scipy.special.gammaincinv(self.degrees / 2, _QUANTILES) / (self.degrees / 2)
        found: Floats = self.variance / np.random.default_rng(_SEED).permutation(quantiles)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The repeats of one run, by configuration."""

    speeds: tuple[Belief | None, ...]  # without what all share in a repeat; None without repeats
    shared: SharedSpread
    disturbed: Floats  # probability of each repeat; NaN where it is missing
    two_speeds: Floats  # probability of each configuration


def fit(log_speeds: Floats, loaded: NDArray[np.bool_] | None = None) -> Fit | None:
    """Fit the repeats of a run; None if no configuration has two: the noise is unknown.

    log_speeds: shape (configurations, repeats), NaN where a repeat is missing. loaded: repeats
    beside which other processes were measured to use the machine.
    """
    known = ~np.isnan(log_speeds)
    if not (known.sum(axis=1) > 1).any():
        return None
    flags = np.zeros_like(known) if loaded is None else loaded
    values, effects, free = _without_shared(log_speeds, known)
    rows = [
        _Repeats(values[n][has], flags[n][has], float(free[has].mean()))
        for n, has in enumerate(known)
        if has.any()
    ]
    points = _probable_points(rows)
    generator = np.random.default_rng(_SEED)
    disturbed = np.full(log_speeds.shape, math.nan)
    two_speeds = np.zeros(len(known))
    speeds: list[Belief | None] = [None] * len(known)
    for number, row in zip(np.flatnonzero(known.any(axis=1)), rows, strict=True):
        hypothesis, noise = row.draw(points, 1 - 1 / len(rows), generator)
        speeds[number] = row.belief(hypothesis, noise)
        disturbed[number, known[number]] = row.disturbed(hypothesis)
        two_speeds[number] = row.is_split[hypothesis].mean()
    return Fit(
        speeds=tuple(speeds),
        shared=_shared(effects),
        disturbed=disturbed,
        two_speeds=two_speeds,
    )


class _Repeats:
    """The hypotheses about the repeats of one configuration, and their probabilities.

    n of R are undisturbed (n = 1 to R); none is; or the configuration has two speeds, and n are of
    the faster group: once for the result being the faster speed, once for the slower one.
    """

    def __init__(self, values: Floats, loaded: NDArray[np.bool_], free: float) -> None:
        """free: degrees of freedom of the noise that one further value has."""
        order = np.argsort(-values)
        ordered, count = values[order], len(values)
        self._rank = np.argsort(order)
        fast, above = np.arange(1, count + 1), _disturbances()
        split = fast[:-1]
        mean, as_one = _as_one_speed(ordered, free)
        slow_mean, slow_as_one = (part[::-1][1:] for part in _as_one_speed(ordered[::-1], free))
        one = as_one + _behind(mean, ordered, fast)
        none = _log_density(above[:, None] + ordered[0] - ordered[1:]).sum(axis=1)
        two = as_one[:-1] + slow_as_one
        two = two + _log_density(np.hypot((mean[:-1] - slow_mean)[:, None], _NOISE))
        none_at_any = np.repeat(none[:, None] - math.log(len(above)), len(_NOISE), axis=1)
        self._likelihood = _scaled(np.concatenate([one, none_at_any, two, two]))
        priors = _log_priors(loaded[order])
        share = scipy.special.betaln(_SLOW + count - split, _FAST + split)
        share = share - scipy.special.betaln(_SLOW, _FAST) + math.log(_TWO_SPEEDS / 2)
        shares = np.repeat(share[:, None], len(_SHARES), axis=1)
        nones = np.repeat(priors[:1], len(above), axis=0)
        self._prior = np.exp(np.concatenate([priors[1:], nones, shares, shares]))
        zeros, halves = np.zeros(len(above), int), np.zeros(len(split), int)
        self._faster = np.concatenate([mean, ordered[0] + above, mean[:-1], mean[:-1]])
        self._centres = np.concatenate([mean, ordered[0] + above, mean[:-1], slow_mean])
        self._seen = np.concatenate([mean, zeros + math.inf, mean[:-1], mean[:-1]])
        self._per_variance = np.concatenate([1 / fast, zeros, 1 / split, 1 / (count - split)])
        self._undisturbed = np.concatenate([fast, zeros, halves + count, halves + count])
        self.is_split = np.concatenate([0 * fast, zeros, halves + 1, halves + 1]) > 0

    def log_evidence(self) -> Floats:
        """Return the likelihood of each noise of the run and share, shape (noises, shares)."""
        evidence = _noise_of_configuration(0.0) @ self._likelihood.T @ self._prior
        found: Floats = np.log(np.maximum(evidence, 1e-300))
        return found

    def draw(
        self,
        points: tuple[NDArray[np.int64], NDArray[np.int64]],
        others: float,
        generator: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw a hypothesis and a noise for each component, by their posterior probability.

        points: equally probable noises of the run and shares. others: how much of the noise of the
        run is that of other configurations.
        """
        noises, shares = points
        unseen = others * min(_OTHER_UNSEEN / len(self._rank) ** 3, _OTHER_MOST)
        of_noise = _noise_of_configuration(unseen)[noises]
        cells = self._prior.T[shares][:, :, None] * of_noise[:, None, :]
        sums = np.cumsum((cells * self._likelihood).reshape(len(noises), -1), axis=1)
        place = (np.arange(_PER_POINT) + generator.random((len(noises), 1))) / _PER_POINT
        place = generator.permuted(place, axis=1)
        number = np.arange(len(noises))[:, None]
        cumulative = (sums / sums[:, -1:] + number).ravel()
        found = np.searchsorted(cumulative, (place + number).ravel())
        found = np.minimum(found, len(cumulative) - 1) % sums.shape[1]
        hypothesis, noise = np.divmod(found, len(_NOISE))
        return hypothesis, noise

    def belief(self, hypothesis: NDArray[np.int64], noise: NDArray[np.int64]) -> Belief:
        faster, centres = self._faster[hypothesis], self._centres[hypothesis]
        variances = np.maximum(_NOISE[noise] ** 2 * self._per_variance[hypothesis], _LEAST)
        found = Belief(float(np.median(faster)), centres, variances, self._seen[hypothesis])
        is_slow = centres < faster
        if self.is_split[hypothesis].mean() < _COUNTS_AS_TWO or not is_slow.any():
            return replace(found, centres=faster)
        # Each of the two speeds is a possible result, so the interval has to contain both.
        order = np.resize(np.flatnonzero(is_slow), COMPONENTS)
        order[::2] = np.resize(np.flatnonzero(~is_slow), COMPONENTS // 2)
        return replace(found, centres=centres[order], variances=variances[order])

    def disturbed(self, hypothesis: NDArray[np.int64]) -> Floats:
        """Return the probability that each repeat was disturbed."""
        found: Floats = (self._undisturbed[hypothesis][:, None] <= self._rank).mean(axis=0)
        return found


def _as_one_speed(ordered: Floats, free: float) -> tuple[Floats, Floats]:
    """Return the mean of the first n values, n = 1, 2, …, and their log likelihood as repeats of
    one unknown speed, shape (n, noises)."""
    count = np.arange(1, len(ordered) + 1)
    shifted = ordered - ordered[0]
    mean = np.cumsum(shifted) / count
    squares = np.maximum(np.cumsum(shifted**2) - count * mean**2, 0.0)[:, None]
    degrees = (count - 1)[:, None]
    likelihood = -squares / (2 * _NOISE**2) - degrees * np.log(_NOISE * math.sqrt(2 * math.pi))
    return mean + ordered[0], free * likelihood - 0.5 * np.log(count)[:, None]


def _behind(mean: Floats, ordered: Floats, fast: NDArray[np.int64]) -> Floats:
    """Return the log likelihood of all but the first n values as disturbed, shape (n, noises)."""
    distance = np.hypot((mean[:, None] - ordered)[:, :, None], _NOISE)
    is_disturbed = np.arange(len(ordered)) >= fast[:, None]
    found: Floats = np.where(is_disturbed[:, :, None], _log_density(distance), 0.0).sum(axis=1)
    return found


def _log_density(disturbance: Floats) -> Floats:
    found: Floats = np.log(disturbance / _SCALE**2) - disturbance / _SCALE
    return found


def _scaled(log_likelihood: Floats) -> Floats:
    found: Floats = np.exp(log_likelihood - log_likelihood.max())
    return found


def _log_priors(loaded: NDArray[np.bool_]) -> Floats:
    """Return the log probability that just the first n repeats are undisturbed, n = 0, 1, …, shape
    (n, shares)."""
    share = np.where(loaded[:, None], _BESIDE_LOAD, _SHARES)
    zero = np.zeros((1, len(_SHARES)))
    before = np.concatenate([zero, np.cumsum(np.log1p(-share), axis=0)])
    behind = np.concatenate([np.cumsum(np.log(share[::-1]), axis=0)[::-1], zero])
    found: Floats = before + behind + math.log1p(-_TWO_SPEEDS)
    return found


@cache
def _disturbances() -> Floats:
    """Return equally probable disturbances."""
    found: Floats = scipy.special.gammaincinv(2.0, (np.arange(6) + 0.5) / 6) * _SCALE
    return found


def _noises_of_run() -> tuple[Floats, Floats, Floats]:
    """Return usual noise, spread over configurations and share of others, for each combination."""
    usual, spread, other = np.meshgrid(_USUAL, _SPREADS, _OTHER_NOISES)
    return usual.ravel(), spread.ravel(), other.ravel()


@cache
def _noise_of_configuration(unseen: float) -> Floats:
    """Return the probability of each noise, shape (noises of the run, noises).

    unseen: the least share of others.
    """
    usual, spread, other = (part[:, None] for part in _noises_of_run())
    near = np.exp(-0.5 * (np.log(_NOISE / usual) / spread) ** 2)
    least, most = _OTHER_FACTORS
    far = (least * usual < _NOISE) & (most * usual > _NOISE)
    parts = [part / np.maximum(part.sum(axis=1, keepdims=True), 1.0) for part in (near, 1.0 * far)]
    share = np.maximum(other, unseen)
    found: Floats = (1 - share) * parts[0] + share * parts[1]
    return found


def _probable_points(rows: list[_Repeats]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return equally probable noises of the run and shares of disturbed repeats."""
    usual = np.log(_noises_of_run()[0] / _USUAL_CENTRE)[:, None]
    total = -0.5 * (usual / _USUAL_SPREAD) ** 2 + sum(row.log_evidence() for row in rows)
    cumulative = np.cumsum(_scaled(total))
    wanted = (np.arange(_POINTS) + 0.5) / _POINTS * cumulative[-1]
    noises, shares = np.unravel_index(np.searchsorted(cumulative, wanted), total.shape)
    return noises, shares


@cache
def normal_draws(rows: int) -> Floats:
    """Return standard normal draws, shape (rows, COMPONENTS); each row has all quantiles."""
    generator = np.random.default_rng(_SEED)
    quantiles = scipy.special.ndtri(_QUANTILES)
    found: Floats = generator.permuted(np.tile(quantiles, (rows, 1)), axis=1)
    return found


def _without_shared(log_speeds: Floats, known: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Return the values without what all configurations share in a repeat, that, and the share of
    the noise that is left.

    It is a weighted two-way fit in which slow repeats count little. What is shared is shrunk by how
    well the configurations of a repeat agree about it.
    """
    values, present = np.where(known, log_speeds, 0.0), known.any(axis=1)
    raw, effects, used = np.zeros((3, known.shape[1]))
    if present.sum() < 2:
        return log_speeds, effects, np.ones(known.shape[1])
    centres = np.nanmedian(np.where(present[:, None], log_speeds, 0.0), axis=1)
    growth = math.sqrt(known.sum() / max(known.sum() - present.sum(), 1))
    total = known.sum(axis=0).astype(float)
    for _ in range(_ROUNDS):
        residuals = values - centres[:, None] - effects
        # 1.48 times the median of the distances is the deviation of normal values
        scale = max(1.48 * growth * float(np.median(np.abs(residuals[known]))), _NOISE[0])
        slow = np.maximum(-residuals / (_SLOW_REPEAT * scale), 0.0)
        weights = known / (1 + slow**4)
        total = np.maximum(weights.sum(axis=0), 1e-9)
        raw = (weights * (values - centres[:, None])).sum(axis=0) / total
        between = max(float(np.var(raw)) - scale**2 / float(total.mean()), 1e-12)
        used = total / (total + scale**2 / between)
        effects = used * raw - np.average(used * raw, weights=total)
        sums = np.maximum(weights.sum(axis=1), 1e-9)
        centres = np.where(present, (weights * (values - effects)).sum(axis=1) / sums, centres)
    # The fitted effects contain a part of the noise of each value, which is missing in the rest.
    part = used / np.maximum(total, 1.0)
    left = (1 - part) ** 2 + np.maximum(total - 1, 0.0) * part**2
    rest = (values - effects - centres[:, None]) / np.sqrt(left)
    without = np.where(known, centres[:, None] + rest, np.nan)
    return without, np.sqrt(used) * (raw - raw.mean()), left


def _shared(effects: Floats) -> SharedSpread:
    """Return that of one repeat. Few tell it badly, so the usual noise counts as half a repeat."""
    degrees = len(effects) - 0.5
    squares = float(effects @ effects) + _USUAL_CENTRE**2 / 2
    return SharedSpread(variance=squares / degrees, degrees=degrees)
