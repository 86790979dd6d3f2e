"""Configurations to choose from: what each costs with respect to a goal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from paceline.analysis.compare.labels import short_name
from paceline.analysis.predict.prediction import CONFIDENCE as PREDICTED
from paceline.analysis.statistics.intervals import CONFIDENCE as MEASURED
from paceline.analysis.statistics.intervals import Interval
from paceline.records.phases import LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.compare.row import Row
    from paceline.analysis.predict.prediction import Prediction

Goal = Literal["time", "cost", "memory"]
UNITS: dict[Goal, str] = {
    "time": "s per 1,000 samples",
    "cost": "core seconds per 1,000 samples",
    "memory": "MiB per node",
}
_SAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration; less is better.

    value: in the goal's unit; its bounds have the confidence of the interval. configuration: None
    for a predicted one.
    """

    name: str
    configuration: str | None
    nodes: int
    value: Interval
    confidence: float
    reason: str  # its main cost
    tied: bool = False  # not separated from the best of its kind

    @property
    def log_mean(self) -> float:
        return math.log(self.value.median)

    @property
    def log_deviation(self) -> float:
        """Deviation of the normal variable that has this interval."""
        half = (math.log(self.value.high) - math.log(self.value.low)) / 2
        return half / _normal_quantile(self.confidence)


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def measured_candidates(
    comparison: Comparison, workload: str, goal: Goal, nodes: int
) -> list[Candidate]:
    """Return the ranked configurations on at most so many nodes that have a value, best first."""
    rows = [r for r in comparison.rows_of(workload) if r.has_comparable_speed and r.nodes <= nodes]
    found = [
        Candidate(
            name=short_name(row, comparison.rows),
            configuration=row.configuration,
            nodes=row.nodes,
            value=value,
            confidence=MEASURED,
            reason=_main_cost(row),
        )
        for row in rows
        if (value := value_of(row, goal)) is not None
    ]
    return sorted(found, key=lambda each: each.value.median)


def ratio(slower: Candidate, faster: Candidate) -> Interval:
    """Return the ratio of two values with its 95 % interval, if their errors are independent."""
    centre = slower.log_mean - faster.log_mean
    deviation = math.hypot(slower.log_deviation, faster.log_deviation)
    half = _normal_quantile(MEASURED) * deviation
    low, median, high = (math.exp(value) for value in (centre - half, centre, centre + half))
    return Interval(median=median, low=low, high=high)


def with_ties(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Mark those that chance may separate from the first one; their errors are independent."""
    if not candidates:
        return []
    best = candidates[0]
    found = [replace(each, tied=ratio(each, best).low < 1) for each in candidates[1:]]
    return [replace(best, tied=any(each.tied for each in found)), *found]


def predicted_candidates(
    predictions: Sequence[Prediction], comparison: Comparison, workload: str, goal: Goal, nodes: int
) -> list[Candidate]:
    """Return predictions that were not measured, best first; none for the goal memory.

    A measurement of another precision or global batch is not one of the prediction.
    """
    if goal == "memory":
        return []
    found = _predicted(predictions, comparison, workload, goal, nodes)
    return sorted(found, key=lambda each: each.value.median)


def _predicted(
    predictions: Sequence[Prediction], comparison: Comparison, workload: str, goal: Goal, nodes: int
) -> Iterator[Candidate]:
    rows = comparison.rows_of(workload)
    for each in predictions:
        if each.workload != workload or not 1 < each.nodes <= nodes:
            continue
        same = [r for r in rows if f"{r.local_strategy} {_on_a_node(r)}" == each.setup]
        place = each.nodes, each.transport, each.precision, each.global_batch
        if any((r.nodes, r.transport, r.precision, r.global_batch) == place for r in same):
            continue  # it was measured
        cores = same[0].cores // same[0].nodes * each.nodes if same else each.nodes
        precision = "" if each.precision == "fp32" else f" in {each.precision}"
        yield Candidate(
            name=f"{each.setup} over {each.transport} on {each.nodes} nodes{precision}",
            configuration=None,
            nodes=each.nodes,
            value=_of_rate(each.samples_per_s, goal, cores),
            confidence=PREDICTED,
            reason=_main_term(each),
        )


def _on_a_node(row: Row) -> str:
    """Return the layout of one node, without the number of nodes before it."""
    return row.layout if row.nodes == 1 else row.layout.split("\N{MULTIPLICATION SIGN}", 1)[1]


def value_of(row: Row, goal: Goal) -> Interval | None:
    """Return the measured value of a row in the goal's unit; None if it was not measured."""
    if goal == "memory":
        if row.memory_peak_bytes is None:
            return None
        mebibytes = row.memory_peak_bytes / row.nodes / 2**20
        return Interval(median=mebibytes, low=mebibytes, high=mebibytes)
    if row.samples_per_s is None:
        return None
    return _of_rate(row.samples_per_s, goal, row.cores)


def _of_rate(rate: Interval, goal: Goal, cores: int) -> Interval:
    """Convert samples per second to the unit of a goal, which is time or cost."""
    seconds = rate.inverse().scaled(_SAMPLES)
    return seconds if goal == "time" else seconds.scaled(cores)


def _main_cost(row: Row) -> str:
    if row.main_cost is None or row.main_cost_share is None:
        return "its steps have no phases"
    label = LABELS.get(row.main_cost, row.main_cost)
    return f"{label} is {100 * row.main_cost_share:.0f} % of its step"


def _main_term(prediction: Prediction) -> str:
    terms = {
        "the own step of a node": prediction.node_s,
        "waiting for the slowest node": prediction.waiting_s,
        "exposed communication": prediction.exposed_s,
    }
    name = max(terms, key=lambda term: terms[term])
    return f"{name} is {100 * terms[name] / sum(terms.values()):.0f} % of its step"
