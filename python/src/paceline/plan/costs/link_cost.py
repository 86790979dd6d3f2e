"""Cost of collective operations between hosts: messages, volumes, and seconds over a link.

The seconds follow the alpha-beta model: each round of messages takes the latency of the link, and
each byte on the critical path takes the inverse of its bandwidth (R. W. Hockney: The Communication
Challenge for MPP, Parallel Computing 20(3), 1994). Every host has a full-duplex link of its own to
a switch that is not a bottleneck.

Sources of the algorithms. ring: the fewest bytes that any all-reduce needs (P. Patarasuk and X.
Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 69(2), 2009).
recursive-doubling and rabenseifner: R. Thakur, R. Rabenseifner and W. Gropp: Optimization of
Collective Communication Operations in MPICH, IJHPCA 19(1), 2005; ranks beyond a power of two send
their data to a neighbour first and receive the result last. naive: every rank sends to every other
one. parameter-server: to rank 0 and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Messages and volumes of one collective operation; volumes in units of its payload.

    rounds: messages that must follow one another. path: volume on the critical path, that is, what
    the busiest link carries in one direction, one round after the other. messages, volumes: of all
    ranks together.
    """

    rounds: int
    path: float
    messages: int
    volumes: float

    def seconds(self, payload_bytes: float, latency_s: float, bytes_per_s: float) -> float:
        """Return the time of the operation over links of this latency and bandwidth.

        payload_bytes: of one rank's tensors. bytes_per_s: of a link, in each direction.
        """
        return self.rounds * latency_s + self.path * payload_bytes / bytes_per_s


def all_reduce(algorithm: str, ranks: int) -> CollectiveCost:
    """Return the cost of summing one tensor over so many ranks. algorithm: a key of ALL_REDUCE."""
    if ranks == 1:
        return CollectiveCost(rounds=0, path=0.0, messages=0, volumes=0.0)
    return ALL_REDUCE[algorithm](ranks)


def all_gather(ranks: int) -> CollectiveCost:
    """Return the cost of a ring in which every rank's tensor reaches all others."""
    return CollectiveCost(
        rounds=ranks - 1,
        path=ranks - 1.0,
        messages=ranks * (ranks - 1),
        volumes=ranks * (ranks - 1),
    )


def all_reduce_bytes(payload_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce that sends no byte twice: the ring."""
    return all_reduce("ring", ranks).path * payload_bytes


def all_gather_bytes(payload_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-gather of its payload."""
    return all_gather(ranks).path * payload_bytes


def exchange_bytes(payload_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-to-all of its payload."""
    return payload_bytes * (ranks - 1) / ranks


def _ring(ranks: int) -> CollectiveCost:
    return CollectiveCost(
        rounds=2 * (ranks - 1),
        path=2 * (ranks - 1) / ranks,
        messages=2 * ranks * (ranks - 1),
        volumes=2 * (ranks - 1),
    )


def _recursive_doubling(ranks: int) -> CollectiveCost:
    stages, power, rest = _power_of_two(ranks)
    rounds = stages + (2 if rest else 0)
    exchanged = power * stages + 2 * rest
    return CollectiveCost(rounds=rounds, path=rounds, messages=exchanged, volumes=exchanged)


def _rabenseifner(ranks: int) -> CollectiveCost:
    stages, power, rest = _power_of_two(ranks)
    folds = 2 if rest else 0
    return CollectiveCost(
        rounds=2 * stages + folds,
        path=2 * (power - 1) / power + folds,
        messages=2 * power * stages + 2 * rest,
        volumes=2 * (power - 1) + 2 * rest,
    )


def _naive(ranks: int) -> CollectiveCost:
    others = ranks - 1
    return CollectiveCost(rounds=1, path=others, messages=ranks * others, volumes=ranks * others)


def _parameter_server(ranks: int) -> CollectiveCost:
    others = ranks - 1
    return CollectiveCost(rounds=2, path=2 * others, messages=2 * others, volumes=2 * others)


def _power_of_two(ranks: int) -> tuple[int, int, int]:
    """Return the exponent of the largest power of two up to `ranks`, that power, and the rest."""
    stages = ranks.bit_length() - 1
    return stages, 2**stages, ranks - 2**stages


ALL_REDUCE: Final[Mapping[str, Callable[[int], CollectiveCost]]] = MappingProxyType(
    {
        "ring": _ring,
        "recursive-doubling": _recursive_doubling,
        "rabenseifner": _rabenseifner,
        "naive": _naive,
        "parameter-server": _parameter_server,
    }
)
