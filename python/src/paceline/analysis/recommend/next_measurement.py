"""The measurement that is expected to improve the decision most.

Beliefs about the logarithms of the values are independent normal variables. The decision takes the
smallest mean. Its expected loss is the mean of how far the chosen value lies above the smallest.
Measuring a candidate once more moves its mean by a normal variable, whose variance is that by which
the belief's variance shrinks. The expected gain of the decision is the knowledge gradient (P.
Frazier, W. Powell and S. Dayanik: A Knowledge-Gradient Policy for Sequential Information
Collection, SIAM Journal on Control and Optimization 47(5), 2008). It is the exact reduction of the
expected loss. Values are medians over repeats, so the variance shrinks as that of a median does:
from two repeats to three by 10 %, not by a third. Ernest (S. Venkataraman et al., NSDI 2016)
chooses its runs by optimal experiment design, too, for the coefficients of a regression; here what
counts is the decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy

from paceline.analysis.statistics.noise import median_efficiency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.analysis.recommend.candidates import Candidate

_DRAWS = 20_000
_SEED = 20160316
_CLOSED = 0.005  # a decision with a smaller expected loss is not worth a measurement
_LEAST_GAIN = 0.001  # a measurement that brings less is not worth proposing
# One measurement may be worth little, and the next one much (Frazier and Powell: Paradoxes in
# Learning and the Marginal Value of Information, Decision Analysis 7(4), 2010): a median over three
# repeats is hardly better than one over two. So the gain for each of two counts, too.
_COUNTS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMeasurement:
    """The candidate to measure, and what that is expected to bring.

    loss_now, gain: shares of the value; gain is that of one measurement. chance: probability that
    the choice is not the best one.
    """

    name: str
    configuration: str | None
    is_predicted: bool
    loss_now: float
    gain: float
    chance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measurement that was made, and the expected loss of the decision around it."""

    configuration: str
    loss_before: float
    loss_expected: float  # after the measurement, as stated before it
    loss_after: float


def next_measurement(candidates: Sequence[Candidate], noise: float) -> NextMeasurement | None:
    """Return the most useful measurement; None if none would improve the decision noticeably.

    noise: deviation of the logarithm of one measurement, of a candidate that was not measured yet.
    """
    if len(candidates) < 2:
        return None
    loss, chance = expected_loss(candidates)
    if loss < _CLOSED:
        return None
    means, _ = _beliefs(candidates)
    gains = np.array(
        [
            knowledge_gradient(means, np.array([_moved(c, noise, count) for c in candidates]))
            for count in _COUNTS
        ]
    )
    per_measurement = (gains.T / _COUNTS).max(axis=1)
    best = int(np.argmax(per_measurement))
    if per_measurement[best] < _LEAST_GAIN:
        return None
    return NextMeasurement(
        name=candidates[best].name,
        configuration=candidates[best].configuration,
        is_predicted=candidates[best].configuration is None,
        loss_now=loss,
        gain=float(gains[0, best]),
        chance=chance,
    )


def knowledge_gradient(
    means: NDArray[np.float64], moved: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return by how much one measurement of each candidate reduces the expected loss.

    means: of the values, of which the smallest is chosen. moved: deviation by which a measurement
    moves each of them. Shapes (candidates,), at least two.
    """
    gains = np.zeros(len(means))
    for number, (mean, by) in enumerate(zip(means, moved, strict=True)):
        if by == 0:
            continue
        z = -abs(mean - np.delete(means, number).min()) / by
        density = math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        gains[number] = by * (z * float(scipy.special.ndtr(z)) + density)
    return gains


def _moved(candidate: Candidate, noise: float, count: int) -> float:
    """Return the deviation by which `count` more measurements move the mean of a belief."""
    error, repeats = candidate.log_error, candidate.repeats
    if error == 0:
        return 0.0
    if repeats == 0:  # a prediction and a measurement are weighted by their precisions
        return error**2 / math.hypot(error, noise / math.sqrt(count))
    before, after = (median_efficiency(n) / math.sqrt(n) for n in (repeats, repeats + count))
    return error * math.sqrt(max(0.0, 1 - (after / before) ** 2))


def expected_loss(candidates: Sequence[Candidate]) -> tuple[float, float]:
    """Return the expected loss of the decision, and the chance that its choice is not the best.

    The loss is a share of the value; both are 0 for fewer than two candidates.
    """
    if len(candidates) < 2:
        return 0.0, 0.0
    means, deviations = _beliefs(candidates)
    generator = np.random.default_rng(_SEED)
    drawn = means + deviations * generator.standard_normal((_DRAWS, len(means)))
    chosen = int(np.argmin(means))
    loss = drawn[:, chosen] - drawn.min(axis=1)
    return float(loss.mean()), float(np.mean(loss > 0))


def _beliefs(
    candidates: Sequence[Candidate],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means and deviations of the logarithms of the values, shape (candidates,)."""
    return (
        np.array([c.log_mean for c in candidates]),
        np.array([c.log_error for c in candidates]),
    )
