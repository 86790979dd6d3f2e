"""The exchange with other nodes: exposed communication, and what it adds to a node's own step.

Exposed: the operations of a step are replayed at the times at which they were requested. They share
one link, so they follow one another: an operation begins when it was requested and all earlier ones
have ended. What ends after the last gradient was ready is exposed, except for the time in which the
node multiplies factors and updates weights that need no further sum.

Added: a rank that sends shares its cores with the kernel, with the threads of the transport and
with the sums, so its own step is longer than that of a node alone, without any waiting. One trial
on several nodes shows by how much. The addition has three parts:

products: of factors of other nodes' samples. They grow with the share of other nodes.
transfer: at most half of the time in which messages were under way, because a core is shared fairly
    by two threads. On another link it lies between two bounds: proportional to the bytes that move
    during the node's own work, and proportional to the time in which they move.
rest: copies and bookkeeping. It is proportional to the node's own step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import scipy
from numpy.typing import NDArray

from paceline.analysis.trial.communication import clock_errors, load_operations, operation_times
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import RankSteps, read_steps
from paceline.base.errors import UsageError
from paceline.plan.costs import ALL_REDUCE, all_gather, all_reduce
from paceline.plan.spec.reduction import StepReduction
from paceline.plan.spec.values import bits_per_s

REDUCES, GATHERS, SCATTERS = "allreduce", "allgather", "alltoall"
_LEAST_RATIO = 0.01  # of a transfer that vanishes: its logarithm is needed
_FAIR_SHARE = 0.5  # of a core, for one of two threads


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOperation:
    """One operation of a step between nodes.

    lead: from its request to the last gradient, as a share of the node's own step. samples: of the
    node when it was recorded; an all-gather of sufficient factors grows with them.
    """

    operation: str
    payload_bytes: float
    lead: float
    samples: float

    def payload_of(self, samples: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the payload for other numbers of samples of a node."""
        if self.operation == GATHERS:
            return self.payload_bytes * samples / self.samples
        return np.full_like(samples, self.payload_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeProfile:
    """The operations of a step in the order of their requests.

    products_s: gradients of layers with factors, computed after the last gradient. after_s: these
    and the update of their weights, all of which needs no sum. global_samples: of the step in which
    they were measured, by all nodes.
    """

    messages: tuple[NodeOperation, ...]
    unknown: tuple[str, ...] = ()  # operations that have no model
    products_s: float = 0.0
    after_s: float = 0.0
    global_samples: float = math.inf

    def growth(self, global_samples: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time of the products of so many samples over the measured one.

        Those of fewer samples are not faster: moving the weights' memory limits them.
        """
        found: NDArray[np.float64] = np.maximum(global_samples / self.global_samples, 1.0)
        return found

    def scaled(self, factor: float) -> ExchangeProfile:
        """Return the profile with other payloads."""
        messages = [replace(m, payload_bytes=factor * m.payload_bytes) for m in self.messages]
        return replace(self, messages=tuple(messages))

    def without_overlap(self) -> ExchangeProfile:
        """Return the profile with all-reduces that are requested after the last gradient."""
        messages = [replace(m, lead=0.0) if m.operation == REDUCES else m for m in self.messages]
        return replace(self, messages=tuple(messages))

    @property
    def reduced_bytes(self) -> float:
        return sum(m.payload_bytes for m in self.messages if m.operation == REDUCES)

    @property
    def gathers(self) -> bool:
        return any(message.operation == GATHERS for message in self.messages)


def declared_profile(reduction: StepReduction, parameters: int, lead: float) -> ExchangeProfile:
    """Return what a strategy says that it exchanges, requested so long before the last gradient."""
    message = NodeOperation(
        operation=REDUCES,
        payload_bytes=reduction.bytes_per_parameter * parameters,
        lead=lead,
        samples=1.0,
    )
    return ExchangeProfile(messages=(message,))


def recorded_profile(
    record: TrialRecord, steps: RankSteps, step_s: float, samples: float, gradient_bytes: float
) -> ExchangeProfile | None:
    """Return the operations of rank 0 in a usual step; None if none was recorded.

    A usual step has the most frequent number of operations; each is described by its medians.
    Operations that the rank awaited within the passes are a part of the node's own step.
    step_s: of the node without communication. samples: of the node. gradient_bytes: of all.
    """
    operations = load_operations(record)
    if operations.is_empty():
        return None
    rank = steps.ranks[0]
    is_within_passes = pl.col("awaited") & (pl.col("asked_s") < pl.col("opened_s"))
    timed = operation_times(steps, operations, clock_errors(record, operations)).filter(
        pl.col("rank") == rank, pl.col("ranks") > 1, pl.col("step").is_in(steps.steady().step),
        pl.col("payload_bytes") > 0, pl.col("opened_s").is_not_null(), ~is_within_passes,
    ).sort("asked_s")  # fmt: skip
    if record.trial.reduction.divides_updates_among_nodes:
        # The first half of the all-to-alls scatters gradients, the second half gathers weights.
        # Together they send what an all-reduce by a ring does.
        of_step = ("step", "operation")
        is_gather = 2 * pl.int_range(pl.len()).over(of_step) >= pl.len().over(of_step)
        timed = timed.filter((pl.col("operation") != SCATTERS) | ~is_gather).with_columns(
            pl.col("operation").replace(SCATTERS, REDUCES)
        )
    by_step = [rows for _, rows in timed.group_by("step", maintain_order=True)]
    if not by_step:
        return None
    usual = Counter(len(rows) for rows in by_step).most_common(1)[0][0]
    alike = [rows for rows in by_step if len(rows) == usual]
    bytes_ = np.array([rows["payload_bytes"].to_numpy() for rows in alike], dtype=np.float64)
    leads = np.array([(rows["opened_s"] - rows["asked_s"]).to_numpy() for rows in alike])
    names = alike[0]["operation"].to_list()
    found = ExchangeProfile(
        messages=tuple(
            NodeOperation(
                operation=name,
                payload_bytes=float(np.median(bytes_[:, place])),
                lead=float(np.median(leads[:, place])) / step_s,
                samples=samples,
            )
            for place, name in enumerate(names)
            if name in (REDUCES, GATHERS)
        ),
        unknown=tuple(sorted(set(names) - {REDUCES, GATHERS, "barrier"})),
    )
    return _with_products(found, record, steps, gradient_bytes) if found.gathers else found


def _with_products(
    profile: ExchangeProfile, record: TrialRecord, steps: RankSteps, gradient_bytes: float
) -> ExchangeProfile:
    """Add what rank 0 does after its last gradient without waiting for a sum.

    The times of the passes exclude the communication of layers, and own_ready_s does, too.
    """
    steady = steps.steady()
    passes_s = sum(steady[name][0] for name in ("data_wait_s", "forward_s", "backward_s"))
    until_ready_s = (steady["own_ready_s"] - steady["started_s"])[0]
    products_s = max(0.0, float(np.nanmedian(passes_s - until_ready_s)))
    summed = profile.reduced_bytes / gradient_bytes if gradient_bytes else 1.0
    update_s = float(np.nanmedian(steady["optimizer_s"][0])) * max(0.0, 1.0 - summed)
    return replace(
        profile,
        products_s=products_s,
        after_s=products_s + update_s,
        global_samples=profile.messages[0].samples * record.trial.placement.nodes,
    )


@dataclass(frozen=True, slots=True)
class Replay:
    """The messages of a step on their link, one after another.

    algorithms: of all-reduces; the fastest is taken for each message. nodes, samples: numbers of
    nodes and the samples of each, shape (nodes,). own_s: the node's step without communication,
    shape (draws, nodes). latency_s, bytes_per_s: of the link for messages that begin before and
    after the last gradient, shape (2, draws, 1). ranks_per_node: those that join an operation. All
    results have the shape of own_s, and are 0 for one node.
    """

    profile: ExchangeProfile
    algorithms: Sequence[str]
    nodes: NDArray[np.int64]
    samples: NDArray[np.float64]
    own_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    bytes_per_s: NDArray[np.float64]
    ranks_per_node: int = 1

    def exposed_s(self) -> NDArray[np.float64]:
        """Return for how long the node waits."""
        *_, (_, ended, _) = self._messages()
        return self._among_several(np.maximum(ended - self._after_s, 0.0))

    def beside_own(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the time of the node's own step in which messages were under way, and the bytes
        on the critical path that moved in it."""
        active_s, moved_bytes = np.zeros_like(self.own_s), np.zeros_like(self.own_s)
        for begun, ended, volume in self._messages():
            within_s = np.clip(np.minimum(ended, self._after_s) - begun, 0.0, None)
            active_s += within_s
            moved_bytes += volume * within_s / np.maximum(ended - begun, np.finfo(float).tiny)
        return self._among_several(active_s), self._among_several(moved_bytes)

    def cost(self, algorithm: str, ranks: int) -> tuple[float, float]:
        """Return rounds and volume on the critical path of a collective, without contention."""
        cost = all_gather(ranks) if algorithm == GATHERS else all_reduce(algorithm, ranks)
        return float(cost.rounds), cost.path

    def _messages(self) -> Iterator[tuple[NDArray[np.float64], ...]]:
        """Yield when each message begins and ends, after the last gradient, and its bytes."""
        ranks = (self.nodes * self.ranks_per_node).tolist()
        ended = np.full_like(self.own_s, -np.inf)
        for message in self.profile.messages:
            names = (GATHERS,) if message.operation == GATHERS else self.algorithms
            costs = np.array([[self.cost(name, count) for count in ranks] for name in names])
            rounds, volumes = costs[..., 0], costs[..., 1] * message.payload_of(self.samples)
            begun = np.maximum(ended, -message.lead * self.own_s)
            latency_s = np.where(begun < 0, *self.latency_s)
            bytes_per_s = np.where(begun < 0, *self.bytes_per_s)
            # of each algorithm, draw and number of nodes
            seconds = rounds[:, None] * latency_s + volumes[:, None] / bytes_per_s
            ended = begun + seconds.min(axis=0)
            yield begun, ended, np.take_along_axis(volumes, seconds.argmin(axis=0), axis=0)

    @property
    def _after_s(self) -> NDArray[np.float64]:
        """Time of the own work after the last gradient that needs no sum, shape (nodes,)."""
        growth = self.profile.growth(self.nodes * self.samples)
        return self.profile.after_s + self.profile.products_s * (growth - 1)

    def _among_several(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(self.nodes > 1, values, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burden:
    """A trial on several nodes, which shows by how much the exchange makes own steps longer.

    replay: of its messages, with its mean step. several_s, alone_s: draws of its step without
    communication, and of the step of a node alone with as many samples, shape (draws, 1).
    """

    replay: Replay
    several_s: NDArray[np.float64]
    alone_s: NDArray[np.float64]


def added_s(replay: Replay, burden: Burden, generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw by how much the exchange makes own steps longer, shape (draws, nodes).

    replay: of the messages beside steps of a node alone. Values between the bounds of the transfer
    are equally likely on a logarithmic scale.
    """
    profile, nodes, own_s = replay.profile, replay.nodes, replay.own_s
    recorded, alone_s = burden.replay, burden.alone_s
    was_active_s, had_moved = (each.item() for each in recorded.beside_own())
    left_s = np.maximum(burden.several_s - alone_s, 0.0)
    longer = replace(replay, own_s=own_s * (1 + left_s / alone_s))
    others = 1 - 1 / recorded.nodes.item()
    products_s = np.minimum(left_s, profile.products_s * others)
    transfer_s = np.minimum(left_s - products_s, _FAIR_SHARE * was_active_s)
    rest_s = left_s - products_s - transfer_s
    ratio = np.ones_like(own_s)
    if was_active_s:
        active_s, moved_bytes = longer.beside_own()
        bounds = np.stack([moved_bytes / had_moved, active_s / was_active_s])
        low, high = np.sort(np.log(np.maximum(bounds, _LEAST_RATIO)), axis=0)
        ratio = np.exp(low + (high - low) * generator.random((len(low), 1)))
    found: NDArray[np.float64] = (
        products_s * (1 - 1 / nodes) / others * profile.growth(nodes * replay.samples)
        + transfer_s * ratio
        + rest_s * own_s / alone_s
    )
    return np.where(nodes > 1, found, 0.0)


# The link between nodes: as given, or as measured by the operations of trials on several nodes
#
# Time of an operation: rounds x latency + volume / bandwidth (`costs.link_cost`). Both numbers are
# fitted to recorded transfer times by non-negative least squares, relative to the times, so that
# short messages count as much as long ones. Computation on the same cores slows operations down, so
# those that begin after the last gradient have another factor than those before.

# A TCP segment carries 1448 bytes of data in 1538 bytes on the wire: Ethernet with an MTU of 1500,
# preamble and gap, IPv4 and TCP headers with time stamps. Between lab hosts of 100 Mbit/s, 0.91 to
# 0.94 of the rate was measured (docs/results/raw/many_ranks.json).
_GOODPUT = (0.90, 1448 / 1538)
# One-way latency between two processes over TCP on a local network, if it was not measured.
_LATENCY_S = (20e-6, 200e-6)
_LEAST_OPERATIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """Latency and bandwidth as ranges; values between the bounds are equally likely.

    bytes_per_s: in each direction, after protocol overheads. Latency: on a logarithmic scale.
    """

    latency_s: tuple[float, float]
    bytes_per_s: tuple[float, float]
    source: str

    def at(self, places: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return latencies and bandwidths at places between their bounds, which are 0 and 1.

        places: of latency and bandwidth, shape (2, count); the result has this shape.
        """
        logs, (low, high) = np.log(self.latency_s), self.bytes_per_s
        latency_s = np.exp(logs[0] + (logs[1] - logs[0]) * places[0])
        return np.stack([latency_s, low + (high - low) * places[1]])

    def slowed(self, factor: float) -> NodeLink:
        """Return the link on which everything takes so many times as long."""
        low_s, high_s = self.latency_s
        low, high = self.bytes_per_s
        return replace(
            self,
            latency_s=(low_s * factor, high_s * factor),
            bytes_per_s=(low / factor, high / factor),
        )


# Of operations that begin before the last gradient, and of those that begin after it.
Links = tuple[NodeLink, NodeLink]


def requested_link(rate: str | None, latency_s: float | None) -> NodeLink | None:
    """Return the link that a user describes, or None for the measured one.

    rate: as in "10gbit". Raises UsageError for another rate, or a latency without a rate.
    """
    if latency_s is not None and not 0 < latency_s < math.inf:
        raise UsageError(f"latency: expected seconds above 0, got {latency_s:g}")
    if rate is not None:
        return given_link(bits_per_s(rate, "link"), latency_s)
    if latency_s is not None:
        raise UsageError(
            "latency: expected --link with it (in Python: link); a measured link has its latency"
        )
    return None


def given_link(rate_bits_per_s: float, latency_s: float | None = None) -> NodeLink:
    """Return a link of this nominal rate. latency_s: None takes the range of local networks."""
    low, high = (share * rate_bits_per_s / 8 for share in _GOODPUT)
    latency = _LATENCY_S if latency_s is None else (latency_s, latency_s)
    return NodeLink(latency_s=latency, bytes_per_s=(low, high), source="as given")


def measured_links(records: Sequence[TrialRecord], algorithms: Sequence[str]) -> Links | None:
    """Fit the link to the operations of trials on several nodes; None if there are too few.

    Often all operations after the last gradient have one size, which does not tell latency from
    bandwidth. So both are fitted to all operations, and then to each kind by one factor.
    algorithms: of operations whose rows do not name one.
    """
    found = [_operations(record, algorithms) for record in records]
    rows = np.concatenate(found) if found else np.zeros((0, 4))
    if len(rows) < _LEAST_OPERATIONS:
        return None
    link, is_late = _fitted(rows), rows[:, 3] > 0
    kinds = rows[~is_late], rows[is_late]
    if min(map(len, kinds)) < _LEAST_OPERATIONS:
        return link, link
    beside, after = (link.slowed(_slowdown(kind, link)) for kind in kinds)
    return beside, after


def _slowdown(rows: NDArray[np.float64], link: NodeLink) -> float:
    """Return the median time of operations over that on the link."""
    (latency_s,), (bytes_per_s,) = link.at(np.full((2, 1), 0.5))
    rounds, volume, seconds, _ = rows.T
    return float(np.median(seconds / (rounds * latency_s + volume / bytes_per_s)))


def _fitted(rows: NDArray[np.float64]) -> NodeLink:
    """Return the link that fits operations best, all alike."""
    rounds, volume, seconds, _ = rows.T
    design = np.stack([rounds, volume], axis=1) / seconds[:, None]
    (latency_s, per_byte_s), _ = scipy.optimize.nnls(design, np.ones(len(rows)))
    if per_byte_s <= 0:  # long messages took no longer than short ones: all is bandwidth
        latency_s = 0.0
    # quantiles of what single operations imply: the noise of the link, not of the mean
    rate = volume / np.maximum(seconds - rounds * latency_s, 0.1 * seconds)
    large = rate[volume >= np.median(volume)]
    low, high = np.quantile(large, [0.25, 0.75])
    latency = max(float(latency_s), 1e-6)
    return NodeLink(
        latency_s=(latency / 2, latency * 2),
        bytes_per_s=(float(low), float(high)),
        source=f"measured by {len(rows)} operations",
    )


def slower_of(first: NodeLink, host: NodeLink) -> NodeLink:
    """Combine a link with the speed at which hosts move bytes.

    TCP keeps both at work at the same time on different bytes, so the slower one limits.
    """
    low, high = (min(pair) for pair in zip(first.bytes_per_s, host.bytes_per_s, strict=True))
    return NodeLink(
        latency_s=(first.latency_s[0], first.latency_s[1] + host.latency_s[1]),
        bytes_per_s=(low, high),
        source=f"{first.source}; hosts: {host.source}",
    )


def _operations(record: TrialRecord, algorithms: Sequence[str]) -> NDArray[np.float64]:
    """Return rounds, volume on the critical path and seconds of each operation of one trial, and
    whether it began after the last gradient of its step."""
    operations = load_operations(record)
    if operations.is_empty():
        return np.zeros((0, 4))
    steps = read_steps(record)
    timed = operation_times(steps, operations, clock_errors(record, operations)).filter(
        pl.col("step").is_in(steps.steady().step),
        pl.col("transfer_s") > 0,
        pl.col("payload_bytes") > 0,
    )
    found = []
    wanted = timed.select(
        "operation", "algorithm", "ranks", "payload_bytes", "transfer_s",
        (pl.col("turn_s") >= pl.col("opened_s")).fill_null(value=False),
    )  # fmt: skip
    for operation, algorithm, ranks, payload, seconds, is_late in wanted.iter_rows():
        if operation == "allgather":
            cost = all_gather(ranks)
        elif operation == "allreduce":
            names = [algorithm] if algorithm in ALL_REDUCE else algorithms
            if not names:
                continue
            cost = min((all_reduce(n, ranks) for n in names), key=lambda c: (c.path, c.rounds))
        else:
            continue
        found.append((cost.rounds, cost.path * payload, seconds, is_late))
    return np.array(found, dtype=np.float64).reshape(-1, 4)
