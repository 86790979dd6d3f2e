"""Predict the steps of node setups on other numbers of nodes, links and batches.

step = node's own step for its share of the batch x slowest of n nodes + exposed communication

Every term comes from measurements: `node` (own step), `burden` (what the exchange adds to it),
`slowest` (order statistics), `overlap` (replayed gradients) and `link`. All of them are drawn
together, DRAWS times, so the interval of a prediction has the uncertainty of each.
"""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.predict.network import SEED, Network, algorithms_of
from paceline.analysis.predict.node import slowest_ratio
from paceline.analysis.predict.prediction import CONFIDENCE, Prediction, Predictions
from paceline.analysis.predict.setup import NodeSetup
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.configuration import node_setup
from paceline.spec.extensions import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.predict.node import NodeModel
    from paceline.analysis.predict.prediction import Refusal, Request
    from paceline.analysis.trial.reading import TrialRecord
    from paceline.plan.trial import Trial

DRAWS = 200
# Standard deviation of a step from its terms: the noise between runs on an idle machine, and what
# the terms do not describe. Chosen with 24 held-out predictions (docs/results/predictions.md).
_ERROR = 0.03
_RATIO_DRAWS = 20  # resamples of the step times for the slowest node


def predict(records: Sequence[TrialRecord], request: Request) -> Predictions:
    """Predict every node setup of the records with every transport between nodes.

    records: finished trials of one or several runs. Raises DataError if a file is damaged,
    UsageError for a transport that there is not.
    """
    for name in request.transports:
        TRANSPORTS.get(name)
    made: list[Prediction] = []
    refused: list[Refusal] = []
    assumptions: dict[str, None] = {}
    by_workload: dict[str, list[TrialRecord]] = defaultdict(list)
    for record in records:
        by_workload[record.trial.training.workload].append(record)
    for same in by_workload.values():
        used = dict.fromkeys(r.trial.transport for r in same)
        names = request.transports or tuple(n for n in used if algorithms_of(n, same))
        setups = [NodeSetup(alike, request) for alike in _grouped(same)]
        networks = [Network(name, same, setups, request.link) for name in names]
        for setup in setups:
            if not _is_wanted(setup.trial, request):
                continue
            found, why = _predict_setup(setup, networks)
            made += found
            refused += why
        for network in networks:
            assumptions |= dict.fromkeys(network.assumptions)
    return Predictions(
        predictions=tuple(
            sorted(made, key=lambda p: (p.workload, p.nodes, -p.samples_per_s.median))
        ),
        refusals=tuple(refused),
        assumptions=tuple(assumptions),
    )


def _grouped(records: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    """Group the trials that compute what the baseline does by node setup and arithmetic."""
    found: dict[Hashable, list[TrialRecord]] = defaultdict(list)
    for record in records:
        trial = record.trial
        if trial.is_exact and trial.training.global_batch:
            arithmetic = (trial.training.precision, trial.training.memory_format)
            found[arithmetic, node_setup(trial)].append(record)
    return list(found.values())


def _predict_setup(
    setup: NodeSetup, networks: Sequence[Network]
) -> tuple[list[Prediction], list[Refusal]]:
    wanted = np.array(sorted(set(setup.request.nodes)), dtype=np.int64)
    model = setup.model
    refused = list(setup.unsupported(model, wanted))
    no = {n for refusal in refused for n in refusal.nodes}
    nodes = np.array([n for n in wanted.tolist() if n not in no], dtype=np.int64)
    if model is None or not len(nodes):
        return [], refused
    own_s = model.seconds(setup.shares(nodes), DRAWS, SEED) * setup.bubble_factor
    slowest = _slowest(model, nodes)
    alone = nodes == 1
    made = _predictions(setup, None, nodes[alone], own_s[:, alone], slowest[:, alone], None)
    if alone.all():
        return made, refused
    nodes, own_s, slowest = nodes[~alone], own_s[:, ~alone], slowest[:, ~alone]
    if not networks:
        refused.append(setup.refusal(nodes, *_NO_TRANSPORT))
    for network in networks:
        reason = _why_not(setup, network)
        if reason is not None:
            refused.append(setup.refusal(nodes, *reason, network.transport))
        else:
            beside_s, exposed_s = network.exchanged(setup, nodes, own_s)
            made += _predictions(setup, network.transport, nodes, beside_s, slowest, exposed_s)
    return made, refused


def _slowest(model: NodeModel, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
    ratio = slowest_ratio(model.ratios, nodes, _RATIO_DRAWS, SEED)
    return np.tile(ratio, (DRAWS // _RATIO_DRAWS, 1))


def _why_not(setup: NodeSetup, network: Network) -> tuple[str, str] | None:
    """Return why a network has no model of a setup, and what to do; None if it has one."""
    if not network.algorithms:
        return "time between nodes has no model", "measure on several nodes"
    if network.link is None:
        return (
            "no trial on several nodes measured the link",
            "give the link (--link 10gbit), or run one configuration on two nodes",
        )
    if not network.knows_messages(setup):
        return (
            "no trial on several nodes measured which linear layers of its stages send factors",
            "run it on two nodes",
        )
    return None


_NO_TRANSPORT = (
    "the runs have no transport between nodes",
    "name one (--transport gloo) and its link (--link 10gbit)",
)


def _predictions(
    setup: NodeSetup,
    transport: str | None,
    nodes: NDArray[np.int64],
    own_s: NDArray[np.float64],
    slowest: NDArray[np.float64],
    exposed: NDArray[np.float64] | None,
) -> list[Prediction]:
    """Return a prediction for each number of nodes.

    own_s, slowest, exposed: draws of the node's step, the ratio of the slowest node, and the
    communication (None: none), each of shape (draws, nodes).
    """
    hidden = np.zeros_like(own_s) if exposed is None else exposed
    bounds = [(1 - CONFIDENCE) / 2, 0.5, (1 + CONFIDENCE) / 2]
    error = np.exp(_ERROR * np.random.default_rng(SEED + 3).standard_normal((DRAWS, 1)))
    steps = np.quantile((own_s * slowest + hidden) * error, bounds, axis=0).T.tolist()
    parts = np.median([own_s, own_s * (slowest - 1), hidden], axis=1).T.tolist()
    found = []
    for n, (low, middle, high), (node_s, waiting_s, exposed_s) in zip(
        nodes.tolist(), steps, parts, strict=True
    ):
        batch = setup.global_batch(n)
        found.append(
            Prediction(
                workload=setup.trial.training.workload,
                setup=setup.name,
                transport=transport,
                precision=setup.trial.training.precision,
                nodes=n,
                global_batch=batch,
                step_s=Interval(median=middle, low=low, high=high),
                samples_per_s=Interval(median=batch / middle, low=batch / high, high=batch / low),
                node_s=node_s,
                waiting_s=waiting_s,
                exposed_s=exposed_s,
                start_s=setup.start_s,
            )
        )
    return found


def _is_wanted(trial: Trial, request: Request) -> bool:
    patterns = request.strategies
    return not patterns or any(fnmatchcase(trial.local_strategy, p) for p in patterns)
