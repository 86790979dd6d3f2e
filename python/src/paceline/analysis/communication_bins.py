"""Group operations by kind and size: number, payload, time and bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import computed_field
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from paceline.analysis.communication_rows import Operations
    from paceline.analysis.communication_times import OperationTimes

# Upper bounds of the sizes that are taken together, those of the fourth paper's figures, made with
# hvprof (Awan, Jain, Chu, Subramoni and Panda: Communication Profiling and Characterization of Deep
# Learning Workloads on Clusters with High-Performance Interconnects, Hot Interconnects, 2019).
BOUNDS_BYTES = (10**5, 10**6, 10**7, 10**8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Operations of one kind, algorithm and range of sizes; of one rank, or summed over ranks.

    Seconds and bytes are sums. wait_s and transfer_s cover the operations that all ranks recorded;
    None if there are none. sent_bytes and sent_messages are None where the transport does not count
    them.
    """

    operation: str
    algorithm: str | None
    least_bytes: int
    most_bytes: int | None  # exclusive; None for no limit
    count: int
    payload_bytes: int
    time_s: float
    wait_s: float | None
    transfer_s: float | None
    exposed_s: float
    overlapped_s: float
    matched_bytes: int  # payload of the operations in transfer_s
    sent_bytes: int | None
    sent_messages: int | None
    expected_bytes: int | None  # sent by all ranks according to the algorithm's formula
    expected_messages: int | None  # lower bound: long messages are sent in several parts

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Payload over transfer time; None where there was no transfer."""
        if not self.transfer_s or not self.matched_bytes:
            return None
        return self.matched_bytes / self.transfer_s


def bins(
    operations: Operations, times: OperationTimes, chosen: NDArray[np.bool_], *, all_ranks: bool
) -> tuple[Bin, ...]:
    """Group the `chosen` rows by operation, algorithm and size.

    all_ranks: True if these are the rows of all ranks. Only then the bytes sent can be compared
    with the formula of the algorithm, because ranks send different parts.
    """
    sizes = np.searchsorted(BOUNDS_BYTES, operations.payload_bytes, side="right")
    rows = np.flatnonzero(chosen)
    keys = np.stack([operations.operation, operations.algorithm, sizes])[:, rows]
    unique, which = np.unique(keys, axis=1, return_inverse=True)
    found = [
        _bin(operations, times, rows[which.reshape(-1) == number], int(size), all_ranks)
        for number, size in enumerate(unique[2])
    ]
    return tuple(sorted(found, key=lambda b: (b.operation, b.algorithm or "", b.least_bytes)))


def _bin(
    operations: Operations,
    times: OperationTimes,
    rows: NDArray[np.int64],
    size: int,
    all_ranks: bool,
) -> Bin:
    first = rows[0]
    operation = operations.operations[operations.operation[first]]
    algorithm = operations.algorithms[operations.algorithm[first]] or None
    matched = rows[~np.isnan(times.wait_s[rows])]
    payloads = operations.payload_bytes[rows]
    expected = None
    if all_ranks:
        expected = _expected(operation, algorithm, operations.ranks[rows], payloads)
    return Bin(
        operation=operation,
        algorithm=algorithm,
        least_bytes=0 if size == 0 else BOUNDS_BYTES[size - 1],
        most_bytes=None if size == len(BOUNDS_BYTES) else BOUNDS_BYTES[size],
        count=len(rows),
        payload_bytes=int(payloads.sum()),
        time_s=float(times.time_s[rows].sum()),
        wait_s=float(times.wait_s[matched].sum()) if len(matched) else None,
        transfer_s=float(times.transfer_s[matched].sum()) if len(matched) else None,
        exposed_s=float(times.exposed_s[rows].sum()),
        overlapped_s=float(times.overlapped_s[rows].sum()),
        matched_bytes=int(operations.payload_bytes[matched].sum()),
        sent_bytes=_counted(operations.sent_bytes[rows]),
        sent_messages=_counted(operations.sent_messages[rows]),
        expected_bytes=None if expected is None else expected[0],
        expected_messages=None if expected is None else expected[1],
    )


def _counted(values: NDArray[np.float64]) -> int | None:
    return None if np.isnan(values).any() else int(values.sum())


def _expected(
    operation: str,
    algorithm: str | None,
    ranks: NDArray[np.int64],
    payloads: NDArray[np.int64],
) -> tuple[int, int] | None:
    """Return the bytes and messages that the algorithm sends in these all-reduces, over all ranks.

    ranks, payloads: of each row, one row per rank. Long messages are sent in several parts, so the
    number of messages is a lower bound.
    """
    if operation != "allreduce" or algorithm not in _FORMULAS:
        return None
    messages, volumes = zip(*(_FORMULAS[algorithm](int(n)) for n in ranks), strict=True)
    each_bytes = np.array(volumes) / ranks * payloads
    return round(float(each_bytes.sum())), round(float((np.array(messages) / ranks).sum()))


def _ring(n: int) -> tuple[int, int]:
    return 2 * n * (n - 1), 2 * (n - 1)


def _doubling(n: int) -> tuple[int, int]:
    stages = n.bit_length() - 1
    power = 2**stages
    exchanged = power * stages + 2 * (n - power)
    return exchanged, exchanged


def _halving(n: int) -> tuple[int, int]:
    stages = n.bit_length() - 1
    power = 2**stages
    folded = 2 * (n - power)
    return 2 * power * stages + folded, 2 * (power - 1) + folded


# For n ranks: messages, and bytes over the payload, that all ranks send together. naive: everybody
# to everybody; parameter-server: to rank 0 and back. ring: the least bytes there can be (Patarasuk
# and Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009).
# The rest: Thakur, Rabenseifner and Gropp: Optimization of Collective Communication Operations in
# MPICH, IJHPCA 19(1), 2005; ranks beyond a power of two hand their part to a neighbour and get the
# result from it.
_FORMULAS: dict[str, Callable[[int], tuple[int, int]]] = {
    "naive": lambda n: (n * (n - 1), n * (n - 1)),
    "parameter-server": lambda n: (2 * (n - 1), 2 * (n - 1)),
    "ring": _ring,
    "recursive-doubling": _doubling,
    "rabenseifner": _halving,
}
