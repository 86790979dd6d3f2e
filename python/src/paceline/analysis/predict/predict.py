"""Predict the steps of node setups on other numbers of nodes, links and batches.

step = node's own step for its share of the batch x slowest of n nodes + exposed communication

Every term comes from measurements: `node` (own step, slowest node), `exchange` (what messages add
to it, and what computation does not hide) and `network` (the link). All of them are drawn together,
DRAWS times, so the interval of a prediction has the uncertainty of each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.predict.exchange import given_link
from paceline.analysis.predict.network import Network, algorithms_of
from paceline.analysis.predict.node import (
    DRAWS,
    NodeSetup,
    NodeStep,
    Spread,
    is_below,
    node_step,
)
from paceline.analysis.predict.prediction import (
    CONFIDENCE,
    Prediction,
    PredictionRequest,
    Predictions,
    Refusal,
    ShareMeasurement,
)
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.load import load_of_trials
from paceline.analysis.trial.reading import TrialRecord, by_workload, node_setup
from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.trials.trial import Trial

# Standard deviation of what the terms do not describe, on several nodes. Calibrated so that the
# intervals contain 90 % of the points of two workloads of python/benchmarks/predictions.py, and
# tested with the points of another one (docs/results/raw/prediction_intervals.json).
MODEL_ERROR = 0.05
_BOUNDS = ((1 - CONFIDENCE) / 2, 0.5, (1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Draws of the step of one setup on so many nodes, shape (DRAWS,)."""

    setup: NodeSetup
    transport: str | None
    nodes: int
    step_s: NDArray[np.float64]
    node_s: float
    waiting_s: float = 0.0
    exposed_s: float = 0.0
    is_bounded: bool = False

    @property
    def batch(self) -> int:
        return self.setup.global_batch(self.nodes)

    @property
    def rate(self) -> NDArray[np.float64]:
        """Samples per second."""
        return self.batch / self.step_s


def predict(records: Sequence[TrialRecord], request: PredictionRequest) -> Predictions:
    """Predict every node setup of the records with every transport between nodes.

    records: finished trials of one or several runs. Raises DataError if a file is damaged,
    UsageError for a transport that there is not.
    """
    for name in request.transports:
        TRANSPORTS.get(name)
    records_of = by_workload(records)
    found = {name: _Workload(same, request) for name, same in records_of.items()}
    order = [
        prediction
        for each in found.values()
        for prediction in sorted(
            each.predictions(), key=lambda p: (p.nodes, -p.samples_per_s.estimate)
        )
    ]
    return Predictions(
        predictions=tuple(order),
        refusals=tuple(refusal for each in found.values() for refusal in each.refusals),
        assumptions=tuple(dict.fromkeys(a for each in found.values() for a in each.assumptions)),
        fastest_alone={
            name: each.alone.setup.name for name, each in found.items() if each.alone is not None
        },
        unmeasured=tuple(wanted for each in found.values() for wanted in each.unmeasured()),
        load={name: load_of_trials(same) for name, same in records_of.items()},
    )


def unmeasured_shares(
    records: Sequence[TrialRecord], request: PredictionRequest
) -> tuple[ShareMeasurement, ...]:
    """Return what narrows predictions: shares of the batch that no trial on one node has.

    Steps among several nodes have the burden of their exchange, so they do not take its place.
    """
    alone = [record for record in records if record.trial.placement.nodes == 1]
    any_link = request.link or given_link(1e9)  # shares depend on none
    return predict(alone, replace(request, link=any_link)).unmeasured


class _Workload:
    """The predictions of one workload."""

    def __init__(self, records: Sequence[TrialRecord], request: PredictionRequest) -> None:
        self._request = request
        self.refusals: list[Refusal] = []
        self.assumptions: list[str] = []
        self._drawn: list[_Drawn] = []
        self._alone: list[_Drawn] = []
        usable = [record for record in records if _is_usable(record.trial)]
        found = [node_step(record) for record in usable]
        steps = [step for step in found if step is not None]
        if not steps:
            name, nodes = records[0].trial.training.workload, request.nodes
            reason = "no step after the warm-up was measured"
            measure = "measure more steps (max_steps)"
            if not usable:
                reason = "no trial trains what the baseline does, with a known batch"
                measure = "add such a trial"
            refusal = Refusal(
                workload=name, setup=name, nodes=nodes, reason=reason, measure=measure
            )
            self.refusals = [refusal]
            return
        spread = Spread(steps)
        batch = request.global_batch or max(
            step.record.trial.training.global_batch for step in steps
        )
        setups = [NodeSetup(alike, spread, request, batch) for alike in _grouped(steps)]
        networks = [
            Network(name, records, setups, request.link) for name in self._transports(records)
        ]
        for setup in setups:
            self._predict(setup, networks)
        for network in networks:
            self.assumptions += network.assumptions

    @property
    def alone(self) -> _Drawn | None:
        """The fastest setup on one node; speedups are relative to it."""
        return max(self._alone, key=lambda each: float(np.median(each.rate)), default=None)

    def unmeasured(self) -> Iterator[ShareMeasurement]:
        """Yield what to measure on one node in place of bounds: shares of the batch."""
        bounded = [
            each for each in self._drawn if each.is_bounded and each.setup.configuration is not None
        ]
        setups = {each.setup.configuration: each.setup.trial for each in bounded}
        replicas = math.lcm(*(trial.placement.replicas_per_node for trial in setups.values()))
        shares = {float(each.setup.shares(np.array([each.nodes]))[0]) for each in bounded}
        for batch in sorted({math.ceil(share / replicas) * replicas for share in shares}):
            yield ShareMeasurement(
                workload=bounded[0].setup.trial.training.workload,
                global_batch=batch,
                configurations=tuple(name for name in setups if name is not None),
            )

    def predictions(self) -> Iterator[Prediction]:
        alone = self.alone
        for each in self._drawn:
            speedup = None
            if alone is not None:
                speedup = _interval(each.rate / alone.rate if each is not alone else np.ones(1))
            yield Prediction(
                workload=each.setup.trial.training.workload,
                setup=each.setup.name,
                configuration=each.setup.configuration,
                transport=each.transport,
                precision=each.setup.trial.training.precision,
                nodes=each.nodes,
                global_batch=each.batch,
                step_s=_interval(each.step_s),
                samples_per_s=_interval(each.rate),
                speedup=speedup,
                node_s=each.node_s,
                waiting_s=each.waiting_s,
                exposed_s=each.exposed_s,
                is_bounded=each.is_bounded,
            )

    def _transports(self, records: Sequence[TrialRecord]) -> list[str]:
        """Return the wanted transports, those of the run, or the first that can be predicted."""
        if self._request.transports:
            return list(self._request.transports)
        used = dict.fromkeys(record.trial.transport for record in records)
        found = [name for name in used if algorithms_of(name, records)]
        if not found:
            found = [name for name in TRANSPORTS.names() if algorithms_of(name, records)][:1]
            self.assumptions += [
                f"{name} between nodes: the run has no transport" for name in found
            ]
        return found

    def _predict(self, setup: NodeSetup, networks: Sequence[Network]) -> None:
        wanted = np.array(sorted({1, *self._request.nodes}), dtype=np.int64)
        refused = list(setup.unsupported(wanted))
        no = {n for refusal in refused for n in refusal.nodes}
        nodes = np.array([n for n in wanted.tolist() if n not in no], dtype=np.int64)
        alone = self._on_one_node(setup) if 1 in nodes else None
        if alone is not None:
            self._alone.append(alone)
        if not _is_wanted(setup.trial, self._request):
            return
        self.refusals += refused
        if alone is not None and 1 in self._request.nodes:
            self._drawn.append(alone)
        nodes = nodes[nodes > 1]
        for network in networks if len(nodes) else ():
            reason = network.why_not(setup)
            if reason is not None:
                self.refusals.append(setup.refusal(nodes, *reason, network.transport))
            else:
                self._drawn += self._on_several(setup, network, nodes)

    def _on_one_node(self, setup: NodeSetup) -> _Drawn:
        """Draw a new run on one node: as measured, or from the steps with other batches."""
        generator = setup.generator("on one node")
        measured = setup.measured_alone()
        if measured is None or setup.bubble_factor != 1:
            share = setup.shares(np.ones(1, dtype=np.int64))
            seconds = setup.seconds(share, generator) * np.exp(setup.new_run(share, generator))
            step_s, transport = seconds[:, 0] * setup.bubble_factor, None
            is_bounded = bool(is_below(share, setup.points)[0])
        else:
            step, point = measured
            step_s = point.draws(generator) * np.exp(point.noise(generator))
            is_joined = TRANSPORTS.get(step.record.trial.transport).joins_ranks
            transport, is_bounded = step.record.trial.transport if is_joined else None, False
        return _Drawn(
            setup=setup,
            transport=transport,
            nodes=1,
            step_s=step_s,
            node_s=float(np.median(step_s)),
            is_bounded=is_bounded,
        )

    def _on_several(
        self, setup: NodeSetup, network: Network, nodes: NDArray[np.int64]
    ) -> Iterator[_Drawn]:
        generator = setup.generator(network.transport)
        share = setup.shares(nodes)
        own_s = setup.seconds(share, generator) * setup.bubble_factor
        beside_s, exposed_s = network.exchanged(setup, nodes, own_s, generator)
        slowest = setup.slowest(nodes)
        error = MODEL_ERROR * generator.standard_normal((DRAWS, 1))
        step_s = beside_s * slowest + exposed_s
        several = network.several(setup)
        if several is None:
            noise = setup.new_run(share, generator)
        else:
            noise = several.noise(generator)[:, None]
        step_s = step_s * np.exp(error + noise)
        bounded = is_below(share, setup.points)
        for place, number in enumerate(nodes.tolist()):
            node_s = float(np.median(beside_s[:, place]))
            yield _Drawn(
                setup=setup,
                transport=network.transport,
                nodes=number,
                step_s=step_s[:, place],
                node_s=node_s,
                waiting_s=node_s * (float(slowest[place]) - 1),
                exposed_s=float(np.median(exposed_s[:, place])),
                is_bounded=bool(bounded[place]),
            )


def _grouped(steps: Sequence[NodeStep]) -> list[list[NodeStep]]:
    """Group the trials by node setup and arithmetic."""
    found: dict[Hashable, list[NodeStep]] = defaultdict(list)
    for step in steps:
        training = step.record.trial.training
        arithmetic = (training.arithmetic, training.memory_format)
        found[arithmetic, node_setup(step.record.trial)].append(step)
    return list(found.values())


def _is_usable(trial: Trial) -> bool:
    """Return whether a trial computes what the baseline does, with a known batch."""
    return trial.is_exact and trial.training.global_batch > 0


def _is_wanted(trial: Trial, request: PredictionRequest) -> bool:
    patterns = request.strategies
    return not patterns or any(fnmatchcase(trial.local_strategy, p) for p in patterns)


def _interval(draws: NDArray[np.float64]) -> Interval:
    low, median, high = np.quantile(draws, _BOUNDS).tolist()
    return Interval(estimate=median, low=low, high=high)
