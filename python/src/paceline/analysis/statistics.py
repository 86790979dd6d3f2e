"""Medians and ratios with 95 % intervals from repeated runs of autocorrelated steps.

What is estimated is the median over repeats of each repeat's median over steps. Its interval is a
hierarchical bootstrap on the logarithmic scale: repeats are drawn with replacement, then moving
blocks of steps within each (Davison and Hinkley, Bootstrap Methods and their Application, 1997,
sections 3.8 and 8.2.3; block length n^(1/3): Hall, Horowitz, Jing, Biometrika 82(3), 1995).

A bootstrap over two or three repeats is too narrow, whatever is drawn (Hesterberg, The American
Statistician 69(4), 2015, section 3.2). So neither bound is nearer to the median than Student's t
puts it for the run-to-run noise, which is estimated from all configurations of a workload
together: repeats are blocks in which every configuration runs once in random order, hence the
residuals of a two-way layout (configuration + repeat) hold the noise with many more degrees of
freedom than the repeats of one configuration. Where one configuration alone is noisier than that,
its own noise counts.

Simulated lognormal steps with and without run-to-run noise are covered in 92 % (one repeat) to over
99 % (many) of cases: tests/unit/analysis/test_statistics.py.

With a single repeat there is no run-to-run noise to estimate, and the interval is over steps only:
callers say so.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

DRAWS = 2000
CONFIDENCE = 0.95
_SEED = 20220131
_Z = 1.959964  # 97.5 % quantile of the normal distribution
_PIECE_ELEMENTS = 2_000_000  # steps resampled at a time, to bound memory
# 97.5 % quantiles of Student's t for 1..10 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_MEDIAN_OVER_MEAN = math.sqrt(math.pi / 2)  # standard errors, large samples of a normal variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median and the bounds of its 95 % interval."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(median=self.median * factor, low=self.low * factor, high=self.high * factor)

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and the bounds of its interval, 95 % unless another was asked for."""

    mean: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


def interval_json(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else interval.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One repeat's positive per-step values, reduced: logarithm of the median, and of resamples."""

    log_median: float
    log_draws: NDArray[np.float64]  # shape (DRAWS,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNoise:
    """Standard deviation of the logarithm of a repeat's median, with its degrees of freedom."""

    deviation: float
    degrees: int


def series(values: NDArray[np.float64], key: str) -> Series | None:
    """Reduce one repeat's steps; None if there are none.

    values: positive, in the order in which they were measured, shape (steps,).
    key: names the repeat; equal keys and values give equal draws.
    """
    if not len(values):
        return None
    generator = np.random.default_rng([_SEED, zlib.crc32(key.encode())])
    return Series(
        log_median=float(np.log(np.median(values))),
        log_draws=np.log(_block_draws(values, generator, np.median)),
    )


def median_interval(
    repeats: Mapping[int, Series], noise: RunNoise | None = None
) -> Interval | None:
    """The median over repeats, with its interval; None without repeats."""
    if not repeats:
        return None
    rows = [repeats[r] for r in sorted(repeats)]
    medians = np.array([s.log_median for s in rows])
    draws = np.stack([s.log_draws for s in rows])
    return _interval(medians, draws, noise)


def ratio_interval(
    numerator: Mapping[int, Series],
    denominator: Mapping[int, Series],
    noise: RunNoise | None = None,
) -> Interval | None:
    """The median over repeats of the ratio within each repeat, with its interval.

    Repeats that only one side has are left out, so that slow drifts of the machine cancel. None
    if no repeat is common.

    noise: of one configuration; a ratio has sqrt(2) times as much.
    """
    common = sorted(set(numerator) & set(denominator))
    if not common:
        return None
    medians = np.array([numerator[r].log_median - denominator[r].log_median for r in common])
    draws = np.stack([numerator[r].log_draws - denominator[r].log_draws for r in common])
    doubled = (
        None
        if noise is None
        else RunNoise(deviation=math.sqrt(2) * noise.deviation, degrees=noise.degrees)
    )
    return _interval(medians, draws, doubled)


def mean_interval(
    values: NDArray[np.float64], key: str, confidence: float = CONFIDENCE
) -> Mean | None:
    """The mean over steps of one run, with its interval over the steps; None if there are none.

    values: of any sign, in the order in which they were measured, shape (steps,).
    key: names them; equal keys and values give equal draws.
    """
    if not len(values):
        return None
    generator = np.random.default_rng([_SEED, zlib.crc32(key.encode())])
    draws = _block_draws(values, generator, np.mean)
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Mean(mean=float(np.mean(values)), low=float(low), high=float(high))


def run_noise(configurations: Sequence[Mapping[int, Series]]) -> RunNoise | None:
    """Run-to-run noise of one configuration beyond what its repeat shares with all others.

    Residuals of log medians from the least-squares fit of configuration + repeat. None where no
    degree of freedom is left (one repeat, or one configuration).
    """
    cells = [
        (number, repeat, found[repeat].log_median)
        for number, found in enumerate(configurations)
        for repeat in sorted(found)
    ]
    if not cells:
        return None
    repeats = sorted({repeat for _, repeat, _ in cells})
    design = np.zeros((len(cells), len(configurations) + len(repeats)))
    for row, (number, repeat, _) in enumerate(cells):
        design[row, number] = 1
        design[row, len(configurations) + repeats.index(repeat)] = 1
    values = np.array([value for _, _, value in cells])
    fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    degrees = len(cells) - int(rank)
    if degrees < 1:
        return None
    residuals = values - design @ fitted
    return RunNoise(deviation=math.sqrt(float(residuals @ residuals) / degrees), degrees=degrees)


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t (Cornish-Fisher beyond the table, error below 0.003)."""
    if degrees <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees - 1]
    z = _Z
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _block_draws(
    values: NDArray[np.float64],
    generator: np.random.Generator,
    reduce: Callable[..., NDArray[np.float64]],
) -> NDArray[np.float64]:
    """`reduce` (np.median, say) of each of DRAWS moving-block resamples of `values`."""
    steps = len(values)
    length = min(steps, math.ceil(steps ** (1 / 3)))
    blocks = -(-steps // length)
    reduced = np.empty(DRAWS)
    piece = max(1, _PIECE_ELEMENTS // steps)
    for start in range(0, DRAWS, piece):
        count = min(piece, DRAWS - start)
        starts = generator.integers(0, steps - length + 1, (count, blocks, 1))
        chosen = (starts + np.arange(length)).reshape(count, -1)[:, :steps]
        reduced[start : start + count] = reduce(values[chosen], axis=1)
    return reduced


def _interval(
    medians: NDArray[np.float64], draws: NDArray[np.float64], noise: RunNoise | None
) -> Interval:
    """medians: shape (repeats,); draws: shape (repeats, DRAWS); both logarithms."""
    repeats = len(medians)
    generator = np.random.default_rng([_SEED, repeats])
    which = generator.integers(0, repeats, (DRAWS, repeats))
    column = generator.integers(0, DRAWS, (DRAWS, repeats))
    centre = float(np.median(medians))
    # each resample's deviation from its own repeat's median, put on the repeat that was drawn
    deviations = np.median(draws[which, column], axis=1) - centre
    low, high = np.quantile(deviations, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    least = _least_half_width(medians, noise)
    return Interval(
        median=math.exp(centre),
        low=math.exp(centre + min(float(low), -least)),
        high=math.exp(centre + max(float(high), least)),
    )


def _least_half_width(medians: NDArray[np.float64], noise: RunNoise | None) -> float:
    """Half the width that Student's t gives for the run-to-run noise; 0 for a single repeat."""
    repeats = len(medians)
    if repeats < 2:
        return 0.0
    own = float(np.std(medians, ddof=1))
    efficiency = 1.0 if repeats == 2 else _MEDIAN_OVER_MEAN
    if noise is None:
        return t_quantile(repeats - 1) * own * efficiency / math.sqrt(repeats)
    deviation = max(own, noise.deviation)
    return t_quantile(noise.degrees) * deviation * efficiency / math.sqrt(repeats)
