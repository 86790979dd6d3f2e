"""Predicted steps of configurations that were not run, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.analysis.predict.exchange import NodeLink
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.load import LoadOfRun

CONFIDENCE = 0.9  # of the intervals of predictions
Scaling = Literal["strong", "weak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """The configurations to predict.

    link: None takes the link that trials on several nodes have measured. strategies: shell patterns
    of local strategies; none takes all. transports: none takes those of the run. global_batch: None
    takes that of the run. micro_batches: of pipelines; None takes the measured number.
    """

    nodes: tuple[int, ...]
    link: NodeLink | None = None
    strategies: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    scaling: Scaling = "strong"
    global_batch: int | None = None
    micro_batches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One configuration; intervals contain a new measurement with a probability of CONFIDENCE.

    configuration: on one node, of the same setup; None without a trial on one node. speedup: over
    the fastest configuration on one node with the batch of the runs; None if it is not known.
    is_bounded: the step of a node was not measured with its share of the batch, so the interval
    covers a step that does not become shorter, up to one in proportion to the share.
    """

    workload: str
    setup: str  # local strategy and layout of a node
    configuration: str | None
    transport: str | None  # between nodes; on one node the one of its measurement
    precision: str
    nodes: int
    global_batch: int
    step_s: Interval
    samples_per_s: Interval
    speedup: Interval | None
    node_s: float  # a node's step without communication between nodes, median
    waiting_s: float  # for the slowest node, median
    exposed_s: float  # communication, median
    is_bounded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Configurations that the data do not support, and the measurement that would."""

    workload: str
    setup: str
    nodes: tuple[int, ...]
    reason: str
    measure: str
    transport: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMeasurement:
    """Configurations of the runs whose steps on one node with this batch would narrow intervals."""

    workload: str
    global_batch: int
    configurations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """All predictions of a request, fastest first within a number of nodes.

    load: of the trials that they come from, by workload.
    fastest_alone: the setup on one node that speedups are relative to, by workload.
    """

    predictions: tuple[Prediction, ...]
    refusals: tuple[Refusal, ...]
    assumptions: tuple[str, ...]
    fastest_alone: Mapping[str, str]
    unmeasured: tuple[ShareMeasurement, ...]
    load: Mapping[str, LoadOfRun]
