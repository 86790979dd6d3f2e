"""Rank measured and predicted configurations for a goal, and say what to measure next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.analysis.compare.ranking import Ranking, rankings
from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.row import Row, short_name
from paceline.analysis.predict.prediction import Prediction, Predictions
from paceline.analysis.statistics.fastest import Fastest
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.records.phases import LABELS

Goal = Literal["time", "cost", "memory"]
_SAMPLES = 1000
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration; less is better.

    configuration: None for a predicted one. value: in the goal's unit, with the 95 % interval of
    the repeats, or the interval of the prediction.
    """

    name: str
    configuration: str | None
    nodes: int
    value: Interval
    reason: str  # its main cost; empty for the goal memory
    tied: bool = False  # not separated from the best measured one, as in `compare`


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
        """The best predicted configuration whose interval is below the best measured one."""
        limit = math.inf if self.best is None else self.best.value.low
        return next((each for each in self.predicted if each.value.high < limit), None)


def recommend(
    comparison: Comparison,
    workload: str,
    goal: Goal = "time",
    nodes: int | None = None,
    predictions: Predictions | None = None,
) -> Recommendation:
    """Rank the configurations of a workload on at most so many nodes. nodes: None is any number.

    The ranking is that of `compare`, so it follows the target if there is one.
    """
    rows = comparison.rows_of(workload)
    most = nodes or max((row.nodes for row in rows), default=1)
    own = {r.configuration: comparison.trials[r.configuration] for r in rows if r.ranked}
    by_speed, by_target = rankings(own, comparison.stopping)
    ranking = _for_goal(by_target or by_speed, own, goal)
    wanted = [row for row in rows if row.ranked and row.nodes <= most]
    measured = sorted(
        _measured(comparison, wanted, ranking, goal),
        key=lambda each: (ranking.has_missed(str(each.configuration)), each.value.median),
    )
    fastest = ranking.fastest(str(each.configuration) for each in measured)
    near = {fastest.leader, *fastest.not_separated} if fastest.not_separated else set()
    predicted = []
    if predictions is not None and goal != "memory" and ranking.target is None:
        predicted = list(_predicted(predictions.predictions, rows, workload, goal, most))
    unavailable = None
    if not measured:
        unavailable = f"no equivalent configuration on at most {most} nodes has a measured {goal}"
    return Recommendation(
        workload=workload,
        goal=goal,
        unit=_unit(ranking, goal),
        nodes=most,
        measured=tuple(replace(each, tied=each.configuration in near) for each in measured),
        predicted=tuple(sorted(predicted, key=lambda each: each.value.median)),
        next_measurement=_next_measurement(fastest, comparison.baselines.get(workload)),
        unavailable=unavailable,
    )


def _for_goal(
    ranking: Ranking, trials: Mapping[str, Sequence[TrialAnalysis]], goal: Goal
) -> Ranking:
    """Return the rates of the goal: samples per second, per core second, or nodes per byte.

    With a target, one over the seconds or core seconds to reach it.
    """
    if goal == "time":
        return ranking
    rates: dict[str, dict[int, RepeatRate]] = {}
    for name, found in trials.items():
        place = found[0].record.trial.placement
        if goal == "memory":
            rates[name] = {
                each.repeat: RepeatRate(log_rate=math.log(place.nodes / peak))
                for each in found
                if (peak := each.usage.memory_peak_bytes)
            }
        else:
            cores = math.log(place.cores)
            rates[name] = {
                repeat: replace(rate, log_rate=rate.log_rate - cores)
                for repeat, rate in ranking.rates.repeats.get(name, {}).items()
            }
    if goal == "memory":
        ranking = replace(ranking, target=None)
    return replace(ranking, rates=RunRates(rates))


def _unit(ranking: Ranking, goal: Goal) -> str:
    if goal == "memory":
        return "MiB per node"
    seconds = "s" if goal == "time" else "core seconds"
    if ranking.target is not None:
        return f"{seconds} to {ranking.target.words}"
    return f"{seconds} per 1,000 samples"


def _measured(
    comparison: Comparison, rows: Sequence[Row], ranking: Ranking, goal: Goal
) -> Iterator[Candidate]:
    for row in rows:
        rate = ranking.rates.rate(row.configuration)
        if rate is None:
            continue
        value = rate.inverse()
        if ranking.has_missed(row.configuration):
            value = replace(value, high=math.inf)
        if goal == "memory":
            value = value.scaled(1 / _MIB)
        elif ranking.target is None:
            value = value.scaled(_SAMPLES)
        yield Candidate(
            name=short_name(row, comparison.rows),
            configuration=row.configuration,
            nodes=row.nodes,
            value=value,
            reason="" if goal == "memory" else _main_cost(row),
        )


def _predicted(
    predictions: Sequence[Prediction], rows: Sequence[Row], workload: str, goal: Goal, nodes: int
) -> Iterator[Candidate]:
    """Yield predictions that were not measured.

    A measurement of another precision or global batch is not one of the prediction.
    """
    for each in predictions:
        if each.workload != workload or not 1 < each.nodes <= nodes:
            continue
        same = [r for r in rows if f"{r.local_strategy} {_on_a_node(r)}" == each.setup]
        place = each.nodes, each.transport, each.precision, each.global_batch
        if any((r.nodes, r.transport, r.precision, r.global_batch) == place for r in same):
            continue
        cores = same[0].cores // same[0].nodes * each.nodes if same else each.nodes
        precision = "" if each.precision == "fp32" else f" in {each.precision}"
        value = each.samples_per_s.inverse().scaled(_SAMPLES)
        yield Candidate(
            name=f"{each.setup} over {each.transport} on {each.nodes} nodes{precision}",
            configuration=None,
            nodes=each.nodes,
            value=value if goal == "time" else value.scaled(cores),
            reason=_main_term(each),
        )


def _on_a_node(row: Row) -> str:
    """Return the layout of one node, without the number of nodes before it."""
    return row.layout if row.nodes == 1 else row.layout.split("\N{MULTIPLICATION SIGN}", 1)[1]


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


def _next_measurement(fastest: Fastest, baseline: str | None) -> NextMeasurement | None:
    if not fastest.undecided or fastest.leader is None:
        return None
    names = [fastest.leader, *fastest.undecided]
    if baseline is not None:
        names.insert(0, baseline)
    return NextMeasurement(
        configurations=tuple(dict.fromkeys(names)), further_repeats=fastest.further_repeats
    )
