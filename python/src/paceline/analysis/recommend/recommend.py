"""Rank measured and predicted configurations for a goal, and say what to measure next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.analysis.recommend.candidates import (
    UNITS,
    Candidate,
    Goal,
    measured_candidates,
    predicted_candidates,
    with_noise,
    with_ties,
)
from paceline.analysis.recommend.next_measurement import (
    NextMeasurement,
    expected_loss,
    next_measurement,
)
from paceline.analysis.statistics.noise import run_noise
from paceline.analysis.statistics.series import ratio_interval
from paceline.records.files import jsonable
from paceline.records.rows import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.predict.prediction import Predictions
    from paceline.analysis.statistics.noise import RunNoises
    from paceline.analysis.statistics.resampling import Series

_UNKNOWN_NOISE = 0.02  # of one measurement, where no repeats show it: usual on an idle machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The configurations of one workload for a goal, measured and predicted ones apart."""

    workload: str
    goal: Goal
    unit: str
    nodes: int
    measured: tuple[Candidate, ...]  # best first
    predicted: tuple[Candidate, ...]
    next_measurement: NextMeasurement | None  # None: none is worth it
    expected_loss: float = 0.0  # of taking the first one, as a share of its value
    unavailable: str | None = None  # why there is no recommendation

    @property
    def best(self) -> Candidate | None:
        """The best measured configuration."""
        return self.measured[0] if self.measured else None

    @property
    def promising(self) -> Candidate | None:
        """The best predicted configuration, if its median is better than the best measured one."""
        if not self.predicted:
            return None
        first = self.predicted[0]
        is_better = self.best is None or first.value.median < self.best.value.median
        return first if is_better else None

    def to_json(self) -> dict[str, Any]:
        """Return one entry of the document of `paceline recommend --json`."""
        document: dict[str, Any] = jsonable(
            {
                "schema": SCHEMA,
                "workload": self.workload,
                "goal": self.goal,
                "unit": self.unit,
                "nodes": self.nodes,
                "unavailable": self.unavailable,
                "measured": self.measured,
                "predicted": self.predicted,
                "next_measurement": self.next_measurement,
                "expected_loss": self.expected_loss,
            }
        )
        return document


def recommend(
    comparison: Comparison,
    workload: str,
    goal: Goal = "time",
    nodes: int | None = None,
    predictions: Predictions | None = None,
) -> Recommendation:
    """Rank the configurations of a workload on at most so many nodes. nodes: None is any number."""
    most = nodes or max((row.nodes for row in comparison.rows_of(workload)), default=1)
    rates = _rates(comparison, workload)
    noises = run_noise(rates)
    candidates = [
        with_noise(each, rates[each.configuration or ""], noises.of(each.configuration or ""))
        for each in measured_candidates(comparison, workload, goal, most)
    ]
    measured = _paired_ties(candidates, comparison, rates, noises, goal)
    predicted = predicted_candidates(
        () if predictions is None else predictions.predictions, comparison, workload, goal, most
    )
    unavailable = None
    if not measured:
        unavailable = f"no equivalent configuration on at most {most} nodes has a measured {goal}"
    return Recommendation(
        workload=workload,
        goal=goal,
        unit=UNITS[goal],
        nodes=most,
        measured=tuple(measured),
        predicted=tuple(with_ties(predicted)),
        next_measurement=next_measurement(
            [*measured, *predicted], noises.pooled.deviation if noises.pooled else _UNKNOWN_NOISE
        ),
        expected_loss=expected_loss([*measured, *predicted])[0],
        unavailable=unavailable,
    )


def _rates(comparison: Comparison, workload: str) -> dict[str, Mapping[int, Series]]:
    names = [row.configuration for row in comparison.rows_of(workload) if row.has_comparable_speed]
    return {
        name: {t.repeat: t.samples_per_s for t in comparison.trials[name] if t.samples_per_s}
        for name in names
    }


def _paired_ties(
    candidates: Sequence[Candidate],
    comparison: Comparison,
    rates: Mapping[str, Mapping[int, Series]],
    noises: RunNoises,
    goal: Goal,
) -> list[Candidate]:
    """Mark those without a significant difference from the first one in common repeats."""
    if len(candidates) < 2 or goal == "memory":
        return list(candidates)
    best = candidates[0]
    found = [best]
    for other in candidates[1:]:
        names = best.configuration or "", other.configuration or ""
        ratio = ratio_interval(rates[names[0]], rates[names[1]], noises.of_ratio(*names))
        cores = 1.0
        if goal == "cost":
            ours, theirs = (comparison.row(c.configuration or "").cores for c in (best, other))
            cores = ours / theirs
        # The costs are equal if the ratio of the speeds is the ratio of the cores.
        found.append(replace(other, tied=ratio is None or ratio.contains(cores)))
    return [replace(best, tied=any(c.tied for c in found)), *found[1:]]
