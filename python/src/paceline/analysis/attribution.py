"""Variance of speed that goes with the choice inside the node, the launcher and the transport.

The logarithm of the speedup of every configuration is modelled by main effects of three choices:
the node (local strategy, replicas, stages, threads), the launcher and the transport. Run, workload,
precision and number of nodes are confounders: their effect is removed first. Choices are often made
together, so the share of each is the mean of its increase of R^2 over all orders in which the
choices enter (R. H. Lindeman, P. F. Merenda and R. Z. Gold: Introduction to Bivariate and
Multivariate Analysis, 1980; U. Groemping, The American Statistician 61(2), 2007).

Intervals come from the resampled speeds of all configurations. A permutation test exchanges the
levels of one choice among configurations of equal confounders. The leave-one-out error predicts
each configuration from all others. None of this shows a cause: choices that were made together with
an unnamed one share its effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy

from paceline.analysis.configuration import node_setup
from paceline.analysis.linear_model import (
    PERMUTATIONS,
    correlation,
    dummies,
    mean_increases,
    members,
    residuals,
)
from paceline.analysis.noise import CONFIDENCE
from paceline.analysis.pairwise import holm
from paceline.analysis.resampling import bootstrap_medians
from paceline.analysis.statistics import Mean

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.row import Row

    Matrix = NDArray[np.float64]

CHOICES = ("node", "launcher", "transport")
LABELS = {
    "node": "the choice inside the node",
    "launcher": "the launcher",
    "transport": "the transport",
}
FIGURES = {
    "cpu_percent": "CPU busy, %",
    "iowait_percent": "IOWait, %",
    "ram_percent_mean": "RAM, %",
    "threads_median": "threads",
    "memory_peak_bytes": "peak memory",
}
_LEAST_FREE = 3  # configurations beyond the parameters of the model
_LEAST_SUPPORT = 1e-9  # 1 - leverage: a smaller one is rounding
_DRAWS = 200
_SEED = 20220131


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A choice, its share of the variance that confounders leave, and its permutation test."""

    choice: str
    levels: int
    share: Mean
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRelation:
    """Rank correlation of a figure of the hosts with speed, without confounders and transport."""

    figure: str
    label: str
    correlation: float
    p_value: float
    is_significant: bool  # at 5 %, Holm over the figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Shares of the choices over all configurations of one or several runs."""

    configurations: int
    shares: tuple[Share, ...]  # in the order of CHOICES; those with one level are left out
    unexplained: float
    leave_one_out_error: float  # typical relative error of predicting one configuration
    figures: tuple[FigureRelation, ...]
    sentence: str

    @property
    def figure_sentence(self) -> str | None:
        """Name the figures of the hosts that go with speed; None if none does significantly."""
        named = [
            f"{each.label} ({each.correlation:+.2f})"
            for each in self.figures
            if each.is_significant
        ]
        if not named:
            return None
        return (
            "Figures of a node that go with speed, at equal workload, nodes and transport (rank "
            f"correlation): {', '.join(named)}."
        )


def attribute(comparisons: Sequence[Comparison]) -> Attribution | None:
    """Attribute the variance of speed over the ranked configurations of all runs.

    None if there are too few configurations for the number of levels, or none has a speedup.
    """
    data = _Data(comparisons)
    if not data.is_sufficient:
        return None
    speeds, draws = data.speeds()
    shares = mean_increases(data.designs, speeds)
    drawn = mean_increases(data.designs, draws)
    found = []
    for place, choice in enumerate(data.choices):
        low, high = np.quantile(drawn[place], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        found.append(
            Share(
                choice=choice,
                levels=data.levels(choice),
                share=Mean(mean=float(shares[place, 0]), low=float(low), high=float(high)),
                p_value=data.permutation_p(choice, speeds, float(shares[place, 0])),
            )
        )
    error = data.leave_one_out_error(speeds[:, 0])
    return Attribution(
        configurations=len(data.rows),
        shares=tuple(found),
        unexplained=float(1 - shares[:, 0].sum()),
        leave_one_out_error=error,
        figures=data.relations(speeds[:, 0]),
        sentence=_sentence(found, len(data.rows), error),
    )


class _Data:
    """Ranked configurations with their levels, confounders and speeds."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        # The baseline is alone with all of its choices, so it says nothing about each of them.
        pairs = [
            (c, row)
            for c in comparisons
            for row in c.rows
            if row.has_comparable_speed and row.speedup and not row.is_baseline
        ]
        self.rows: list[Row] = [row for _, row in pairs]
        self._trials = [c.trials[row.configuration] for c, row in pairs]
        self._levels: dict[str, list[Hashable]] = {
            "node": [node_setup(trials[0].record.trial) for trials in self._trials],
            "launcher": [row.launcher for row in self.rows],
            "transport": [row.transport for row in self.rows],
        }
        runs = [next(n for n, c in enumerate(comparisons) if c is own) for own, _ in pairs]
        self._confounders: list[Hashable] = [
            (run, row.workload, row.precision, row.nodes)
            for run, row in zip(runs, self.rows, strict=True)
        ]
        self.choices = [name for name in CHOICES if len(set(self._levels[name])) > 1]
        self._base = dummies(self._confounders)
        self.designs = {name: self._adjusted(self._levels[name]) for name in self.choices}

    @property
    def is_sufficient(self) -> bool:
        if not self.choices or not self.rows:
            return False
        whole = np.hstack([self._base, *self.designs.values()])
        return len(self.rows) - int(np.linalg.matrix_rank(whole)) >= _LEAST_FREE

    def levels(self, choice: str) -> int:
        return len(set(self._levels[choice]))

    def speeds(self) -> tuple[Matrix, Matrix]:
        """Return log speeds and resampled ones, without the effect of the confounders.

        Shapes (configurations, 1) and (configurations, _DRAWS).
        """
        series = [[t.samples_per_s for t in ts if t.samples_per_s] for ts in self._trials]
        medians = np.array([np.median([s.log_median for s in own]) for own in series])
        draws = [bootstrap_medians(np.stack([s.log_draws for s in own])) for own in series]
        return (
            self._without_confounders(medians[:, None]),
            self._without_confounders(np.stack(draws)[:, :_DRAWS]),
        )

    def permutation_p(self, choice: str, speeds: Matrix, share: float) -> float:
        """Return the share of permuted levels that explain as much as the real ones."""
        generator = np.random.default_rng(_SEED)
        levels = np.array([hash(level) for level in self._levels[choice]])
        groups = members(self._confounders)
        place, reached = self.choices.index(choice), 1
        for _ in range(PERMUTATIONS):
            permuted = levels.copy()
            for same in groups:
                permuted[same] = generator.permutation(levels[same])
            designs = {**self.designs, choice: self._adjusted(permuted.tolist())}
            reached += bool(mean_increases(designs, speeds)[place, 0] >= share - 1e-12)
        return reached / (1 + PERMUTATIONS)

    def leave_one_out_error(self, speeds: NDArray[np.float64]) -> float:
        """Return the root mean square of the relative errors of predicted configurations.

        Each is predicted by the whole model, confounders included, as fitted to all others. With
        the leverage h, its error is its residual over 1 - h. Configurations which no other one
        supports (h = 1) are left out.
        """
        whole = np.hstack([self._base, *self.designs.values()])
        basis = scipy.linalg.orth(whole, rcond=1e-9)
        free = 1 - np.square(basis).sum(axis=1)
        known = free > _LEAST_SUPPORT
        residual = speeds - basis @ (basis.T @ speeds)
        errors = np.expm1(-residual[known] / free[known])
        return float(np.sqrt(np.mean(np.square(errors))))

    def relations(self, speeds: NDArray[np.float64]) -> tuple[FigureRelation, ...]:
        """Correlate the ranks of figures and speeds, both without confounders and transport."""
        known = {
            name: values
            for name in FIGURES
            if not np.isnan(values := self._figure(name)).any() and np.ptp(values) > 0
        }
        base = np.hstack([self._base, self.designs.get("transport", self._base[:, :0])])
        generator = np.random.default_rng(_SEED)
        ranked = residuals(base, scipy.stats.rankdata(speeds))
        found = {
            name: correlation(residuals(base, scipy.stats.rankdata(values)), ranked, generator)
            for name, values in known.items()
        }
        rejected = holm(np.array([p for _, p in found.values()]), 1 - CONFIDENCE)
        return tuple(
            FigureRelation(
                figure=name,
                label=FIGURES[name],
                correlation=found_correlation,
                p_value=p_value,
                is_significant=bool(significant),
            )
            for (name, (found_correlation, p_value)), significant in zip(
                found.items(), rejected, strict=True
            )
        )

    def _figure(self, name: str) -> NDArray[np.float64]:
        values = [getattr(row, name) for row in self.rows]
        return np.array([np.nan if value is None else float(value) for value in values])

    def _adjusted(self, levels: Sequence[Hashable]) -> Matrix:
        return self._without_confounders(dummies(levels))

    def _without_confounders(self, values: Matrix) -> Matrix:
        return residuals(self._base, values)


def _sentence(shares: Sequence[Share], configurations: int, error: float) -> str:
    parts = [
        f"{LABELS[s.choice]} goes with {100 * s.share.mean:.0f} % "
        f"({100 * s.share.low:.0f} to {100 * s.share.high:.0f} %"
        f"{'' if s.p_value < 1 - CONFIDENCE else ', not significant'})"
        for s in shares
    ]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return (
        f"Over {configurations} configurations, {listed} of the variance of speed; a configuration "
        f"is predicted from the others within {100 * error:.0f} %. These are correlations."
    )
