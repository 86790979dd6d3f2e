"""The step of one node without communication between nodes, by its share of the batch.

The time is affine in the samples, t(b) = c0 + c1 b, between the measured shares: each operation has
a fixed cost and one per sample. It is not extrapolated: smaller shares use cores worse, and larger
ones may not fit the caches or the memory.

A synchronous step ends with its slowest node. If the nodes' times are independent with distribution
function F, the largest of n has F^n, so its mean is the integral of the quantile function over
u^n (H. A. David and H. N. Nagaraja: Order Statistics, 3rd edition, 2003, section 2.1 and 3.1). The
quantile function is that of the measured steps; nothing is assumed beyond the largest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.statistics.resampling import DRAWS, mean_draws
from paceline.analysis.trial.steps import global_steps, read_steps
from paceline.spec.extensions import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.analysis.trial.reading import TrialRecord

_MARGIN = 1.1  # shares up to a tenth outside of the measured ones are accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStep:
    """The steps of one node in one trial."""

    samples: float  # of the node in a step
    nodes: int
    times: NDArray[np.float64]  # seconds, shape (nodes * steps,)
    mean_s: float
    draws: NDArray[np.float64]  # of the mean, shape (DRAWS,)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """Measured points of one node setup: shares, mean seconds and draws."""

    shares: NDArray[np.float64]  # ascending, shape (points,)
    draws: NDArray[np.float64]  # of the mean seconds, shape (points, DRAWS)
    ratios: NDArray[np.float64]  # times over the mean of their trial, all trials together

    def supports(self, share: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell for each share whether it lies among the measured ones."""
        inside: NDArray[np.bool_] = (share >= self.shares[0] / _MARGIN) & (
            share <= self.shares[-1] * _MARGIN
        )
        return inside

    def seconds(self, share: NDArray[np.float64], draws: int, seed: int) -> NDArray[np.float64]:
        """Return the step for each share, shape (draws, shares).

        Between two neighbouring measured shares the line through them counts, so a measured share
        has its measured time.
        """
        generator = np.random.default_rng(seed)
        chosen = self.draws[:, generator.integers(0, DRAWS, draws)]  # (points, draws)
        return self._between(chosen, share)

    def mean_s(self, share: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean step for each share, shape (shares,)."""
        mean_s: NDArray[np.float64] = self._between(self.draws.mean(axis=1)[:, None], share)[0]
        return mean_s

    def _between(
        self, points: NDArray[np.float64], share: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return values on the lines between measured points, shape (draws, shares).

        points: at the measured shares, shape (points, draws).
        """
        if len(self.shares) == 1:
            scaled: NDArray[np.float64] = points.T * (share / self.shares[0])
            return scaled
        right = np.clip(np.searchsorted(self.shares, share), 1, len(self.shares) - 1)
        left = right - 1
        weight = (share - self.shares[left]) / (self.shares[right] - self.shares[left])
        on_line: NDArray[np.float64] = points[left].T * (1 - weight) + points[right].T * weight
        return on_line


def node_step(record: TrialRecord) -> NodeStep | None:
    """Measure the node's step of one trial; None without a step after the warm-up.

    Each rank's time is its step without waiting for other ranks and transfer, if messages carry the
    gradients between ranks; the slowest rank of a node counts.
    """
    steps = read_steps(record)
    place = record.trial.placement
    common = global_steps(record, steps)
    steady = common.steady
    chosen = np.searchsorted(steps.step, common.step[steady])
    if not len(chosen):
        return None
    own = steps["step_s"][:, chosen]
    if TRANSPORTS.get(record.trial.transport).spans_nodes and place.ranks > 1:
        own = own - np.nan_to_num(steps["comm_s"][:, chosen])
    nodes = np.array([rank // place.ranks_per_node for rank in steps.ranks])
    times = np.stack([own[nodes == node].max(axis=0) for node in np.unique(nodes)])
    samples = float(np.median(common.samples[steady])) / place.nodes
    return NodeStep(
        samples=samples,
        nodes=place.nodes,
        times=times.ravel(),
        mean_s=float(times.mean()),
        draws=mean_draws(times.mean(axis=0)[None, :], record.trial.id)[:, 0],
    )


def node_model(found: Sequence[NodeStep], noise: Sequence[NodeStep]) -> NodeModel:
    """Combine trials of one node setup; trials with equal shares count as repeats.

    noise: trials whose deviations from their mean show how much steps differ.
    """
    shares = np.unique([step.samples for step in found])
    draws = [np.mean([s.draws for s in found if s.samples == b], axis=0) for b in shares]
    return NodeModel(
        shares=shares,
        draws=np.stack(draws),
        ratios=np.concatenate([step.times / step.mean_s for step in noise]),
    )


_CELLS = 200  # of equal probability below the tail, and as many in the tail
_TAIL = 0.9


def slowest_ratio(
    times: NDArray[np.float64], nodes: NDArray[np.int64], draws: int, seed: int
) -> NDArray[np.float64]:
    """Return the mean of the largest of n times over the mean of one.

    times: of one node, in any order, shape (steps,). nodes: shape (n,). Returns (draws, n): one row
    for each resample of the times, drawn with replacement.
    """
    generator = np.random.default_rng(seed)
    edges = _edges(len(times))
    middles = (edges[1:] + edges[:-1]) / 2
    ordered = np.sort(times)
    weights = np.diff(edges[None, :] ** nodes[:, None], axis=1)
    found = np.empty((draws, len(nodes)))
    for row in range(draws):
        counts = np.bincount(generator.integers(0, len(times), len(times)), minlength=len(times))
        sample = np.repeat(ordered, counts)  # in order, without sorting again
        found[row] = weights @ sample[(middles * len(sample)).astype(int)] / sample.mean()
    return np.where(nodes == 1, 1.0, np.maximum(found, 1.0))


@cache
def _edges(steps: int) -> NDArray[np.float64]:
    """Return the borders of cells of probability, finer towards 1: the largest times decide."""
    tail = 1 - np.geomspace(1 - _TAIL, 0.5 / steps, _CELLS)
    return np.concatenate([np.linspace(0, _TAIL, _CELLS)[:-1], tail, [1.0]])
