"""Speedups on several nodes, predicted from trials on one node and the rate of the link.

Trials on several nodes are held out: `predict` sees those on one node, and the steps that
`paceline predict --measure` has added to them. What it needs beside them and does not have is named
in place of a number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.compare.places import Place, place_of
from paceline.analysis.compare.ranking import Ranking
from paceline.analysis.compare.row import Row
from paceline.analysis.predict.exchange import given_link
from paceline.analysis.predict.predict import predict
from paceline.analysis.predict.prediction import Prediction, PredictionRequest
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.reading import TrialRecord, node_setup
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.plan.spec.values import bits_per_s
from paceline.plan.trials.trial import Trial

Trials = Mapping[str, Sequence[TrialAnalysis]]  # by configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeedup:
    """One configuration on several nodes; speedups are over the baseline."""

    place: Place
    configuration: str
    alone: str | None  # its configuration on one node
    measured: Interval
    predicted: Interval | None = None  # 90 % interval of a new run
    error: Interval | None = None  # predicted over measured, with the interval of the measured
    reason: str | None = None  # why it is not predicted

    @property
    def is_within(self) -> bool:
        """Tell whether the measured speedup lies in the predicted interval."""
        found = self.predicted
        return found is not None and found.low <= self.measured.estimate <= found.high


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedChoice:
    """The strategy at one place that has the highest predicted speed, among those predicted.

    Strategies are named by their configurations on one node.
    """

    place: Place
    chosen: str
    fastest: str  # as measured
    not_separated: tuple[str, ...]  # may be the fastest as well, without the fastest measured one
    is_right: bool | None  # None: the chosen one may be the fastest, and others, too
    ahead: Interval | None  # measured speed of the fastest over the chosen; None: it is the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class FromOneNode:
    """All configurations of one workload on several nodes, in order of the places."""

    speedups: tuple[PredictedSpeedup, ...]
    choices: tuple[PredictedChoice, ...]  # of places with at least two predictions


def predict_from_one_node(
    rows: Sequence[Row],
    alone: Mapping[str, str | None],
    trials: Trials,
    ranking: Ranking,
    shares: Sequence[TrialRecord],
) -> FromOneNode:
    """Predict each configuration on several nodes, and compare it with its measured speedup.

    rows: of one arithmetic. alone: the configuration on one node of each configuration on several.
    shares: finished trials on one node with the batch of a node's share.
    """
    known = {row.configuration: row for row in rows}
    names = [name for name, row in known.items() if row.placement.nodes == 1]
    records = [trial.record for name in names for trial in trials[name]]
    records += [share for share in shares if share.trial.configuration in names]
    there = {name: trials[name][0].record for name in alone}
    found: dict[str, Prediction | str] = {}
    for name, first in alone.items():
        reason = _not_measured(there[name], None if first is None else known[first], records)
        if reason is not None:
            found[name] = reason
    found |= _predictions([there[name] for name in alone.keys() - found.keys()], records)
    speedups = []
    for name, first in alone.items():
        each = found[name]
        measured, predicted = _speedup(known[name]), None
        if isinstance(each, Prediction) and first is not None:
            predicted = _over_baseline(each, known[first])
        speedups.append(
            PredictedSpeedup(
                place=place_of(there[name].trial),
                configuration=name,
                alone=first,
                measured=measured,
                predicted=predicted,
                error=None if predicted is None else measured.inverse().scaled(predicted.estimate),
                reason=each if isinstance(each, str) else None,
            )
        )
    speedups.sort(key=lambda each: (each.place.order, -each.measured.estimate))
    return FromOneNode(speedups=tuple(speedups), choices=tuple(_choices(speedups, ranking)))


def _not_measured(
    there: TrialRecord, alone: Row | None, records: Sequence[TrialRecord]
) -> str | None:
    """Return what a prediction needs and no trial on one node tells; None if there is nothing."""
    if alone is None:
        return "there is no trial on one node"
    lacks = {
        "the samples of a step are not known": alone.speed.samples_per_s is None,
        "the rate of the link was not recorded": there.link is None,
        "the size of the gradients was not recorded": not any(each.result for each in records),
        "which layers send factors is known on several nodes only": _sends_factors(there),
    }
    return next((reason for reason, is_lacking in lacks.items() if is_lacking), None)


def _sends_factors(there: TrialRecord) -> bool:
    if there.result is None:
        return False
    factors = there.result.communication.get("sufficient_factors", {})
    return any(layer.get("sends_factors") for layer in factors.get("layers", []))


def _predictions(
    held_out: Sequence[TrialRecord], records: Sequence[TrialRecord]
) -> dict[str, Prediction | str]:
    """Return the prediction of each configuration, or why there is none.

    Of the trials that are held out, only the plan and the rate of the link are used.
    """
    setups = {record.trial.configuration: node_setup(record.trial) for record in records}
    same: dict[tuple[str, str, int], list[Trial]] = defaultdict(list)
    for record in held_out:
        trial = record.trial
        assert record.link is not None, "_not_measured"
        same[trial.transport, record.link, trial.training.global_batch].append(trial)
    found: dict[str, Prediction | str] = {}
    for (transport, link, batch), trials in same.items():
        request = PredictionRequest(
            nodes=tuple(sorted({trial.placement.nodes for trial in trials})),
            link=given_link(bits_per_s(link, "link")),
            transports=(transport,),
            global_batch=batch,
        )
        every = predict(records, request)
        for trial in trials:
            nodes, setup = trial.placement.nodes, node_setup(trial)
            name = f"{trial.local_strategy} {trial.layout}"
            predicted = (
                each
                for each in every.predictions
                if each.nodes == nodes and setups.get(each.configuration or "") == setup
            )
            refused = (
                each.reason for each in every.refusals if nodes in each.nodes and each.setup == name
            )
            found[trial.configuration] = _unbounded(next(predicted, None)) or next(
                refused, "no step on one node was measured"
            )
    return found


def _unbounded(found: Prediction | None) -> Prediction | str | None:
    """Return a prediction; of one that has only bounds, the step that was not measured."""
    if found is None or not found.is_bounded:
        return found
    samples = f"{found.global_batch / found.nodes:g} samples"
    return f"the step of one node with {samples} was not measured (`paceline predict --measure`)"


def _over_baseline(found: Prediction, alone: Row) -> Interval:
    """Return the predicted speedup over the baseline, as that on one node is."""
    rate = alone.speed.samples_per_s
    assert rate is not None, "_not_measured"
    return found.samples_per_s.scaled(_speedup(alone).estimate / rate.estimate)


def _speedup(row: Row) -> Interval:
    assert row.speed.speedup is not None, "rows of `relate` have one"
    return row.speed.speedup


def _choices(speedups: Sequence[PredictedSpeedup], ranking: Ranking) -> Iterator[PredictedChoice]:
    at_places: dict[Place, dict[str, float]] = defaultdict(dict)
    alone = {each.configuration: each.alone or each.configuration for each in speedups}
    for each in speedups:
        if each.predicted is not None:
            at_places[each.place][each.configuration] = each.predicted.estimate
    chosen_at = {place: at for place, at in at_places.items() if len(at) > 1}
    for place, at in chosen_at.items():
        chosen = max(at, key=at.__getitem__)
        level = ranking.level / len(chosen_at)
        measured = ranking.rates.fastest(at, level=level, margin=ranking.margin)
        assert measured.leader is not None, "all have a speed"
        best = (measured.leader, *measured.not_separated)
        yield PredictedChoice(
            place=place,
            chosen=alone[chosen],
            fastest=alone[measured.leader],
            not_separated=tuple(alone[name] for name in measured.not_separated),
            is_right=False if chosen not in best else True if len(best) == 1 else None,
            ahead=None if chosen == best[0] else ranking.rates.ratio(best[0], chosen),
        )
