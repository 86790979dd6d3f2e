"""Rank measured and predicted configurations for a goal, and say what to measure next."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.analysis.compare.ranking import rankings
from paceline.analysis.recommend.candidates import (
    UNITS,
    Candidate,
    Goal,
    measured_candidates,
    predicted_candidates,
    with_ties,
)
from paceline.analysis.statistics.rates import RunRates
from paceline.records.files import jsonable
from paceline.records.rows import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.predict.prediction import Predictions
    from paceline.analysis.statistics.rates import FastestNames


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMeasurement:
    """One more repeat of those that are not separated from the best, with the baseline.

    They run as one block, so what they share in it cancels, as in every other repeat.
    """

    configurations: tuple[str, ...]
    further_repeats: int | None  # expected number that would decide; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The configurations of one workload for a goal, measured and predicted ones apart."""

    workload: str
    goal: Goal
    unit: str
    nodes: int
    measured: tuple[Candidate, ...]  # best first
    predicted: tuple[Candidate, ...]
    next_measurement: NextMeasurement | None  # None: everything is decided
    unavailable: str | None = None  # why there is no recommendation

    @property
    def best(self) -> Candidate | None:
        """The best measured configuration."""
        return self.measured[0] if self.measured else None

    @property
    def promising(self) -> Candidate | None:
        """The best predicted configuration, if it is better than the best measured one."""
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
    candidates = measured_candidates(comparison, workload, goal, most)
    fastest = _compared(candidates, comparison, workload, goal)
    measured = _with_marks(candidates, fastest)
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
        next_measurement=_next_measurement(fastest, comparison.baselines.get(workload)),
        unavailable=unavailable,
    )


def _compared(
    candidates: Sequence[Candidate], comparison: Comparison, workload: str, goal: Goal
) -> FastestNames | None:
    """Compare the candidates with the best one; None for a goal without repeated values.

    The cost of a sample is a rate, too: samples per core second.
    """
    if goal == "memory":
        return None
    rows = {row.configuration: row for row in comparison.rows_of(workload)}
    own = {name: comparison.trials[name] for name in rows if name in comparison.trials}
    ranking, _ = rankings(own, comparison.stopping)
    cores = {name: rows[name].cores if goal == "cost" else 1 for name in own}
    rates = RunRates(
        {
            name: {
                repeat: replace(rate, log_rate=rate.log_rate - math.log(cores[name]))
                for repeat, rate in found.items()
            }
            for name, found in ranking.rates.repeats.items()
        }
    )
    names = [each.configuration for each in candidates if each.configuration is not None]
    return replace(ranking, rates=rates).fastest(names)


def _with_marks(candidates: Sequence[Candidate], fastest: FastestNames | None) -> list[Candidate]:
    """Mark the candidates that are not separated from the best, and the best if there are any."""
    if fastest is None or not fastest.not_separated:
        return list(candidates)
    near = {fastest.leader, *fastest.not_separated}
    return [replace(each, tied=each.configuration in near) for each in candidates]


def _next_measurement(fastest: FastestNames | None, baseline: str | None) -> NextMeasurement | None:
    if fastest is None or not fastest.undecided or fastest.leader is None:
        return None
    names = [fastest.leader, *fastest.undecided]
    if baseline is not None:
        names.insert(0, baseline)
    return NextMeasurement(
        configurations=tuple(dict.fromkeys(names)), further_repeats=fastest.further_repeats
    )
