"""The link between nodes: as given, or as measured by the operations of trials on several nodes.

Time of an operation: rounds x latency + volume / bandwidth (`costs.link_cost`). Both numbers are
fitted to recorded transfer times by non-negative least squares, relative to the times, so that
short messages count as much as long ones. Computation on the same cores slows operations down, so
those that begin after the last gradient have another factor than those before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import scipy
from numpy.typing import NDArray

from paceline.analysis.trial.operations import clock_errors, load_operations, operation_times
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import read_steps
from paceline.base.errors import UsageError
from paceline.plan.costs.link_cost import ALL_REDUCE, all_gather, all_reduce
from paceline.plan.spec.values import bits_per_s

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
