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

The gradient of a layer can also be given to all ranks as its sufficient factors (the inputs of the
layer and the gradients of its outputs): each computes the product over the samples of all. Factors
are smaller if the layer is large and the samples of a rank are few (Zhang et al.: Poseidon, USENIX
ATC 2017, chooses by bytes; Xie et al.: Lighter-Communication Distributed Machine Learning via
Sufficient Factor Broadcasting, UAI 2016). Here the choice also counts the latency of messages and
the time of the larger product. Every rank computes the same decision from the same measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final


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


_GRADIENT_BYTES = 4  # float32
_INDEX_BYTES = 8  # int64


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorSpeeds:
    """Measured speeds of the slowest rank; see `strategies.reduction.factor_choice`."""

    latency_s: float  # of one step of a collective
    all_reduce_bytes_per_s: float  # bytes that a rank sends
    all_gather_bytes_per_s: float  # the same
    product_flop_per_s: float  # of the product of factors over the samples of all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A linear layer as the ranks of one group see it."""

    positions: ClassVar[int] = 1  # rows of a factor for each sample
    has_indices: ClassVar[bool] = False  # True: inputs are indices, gradients of outputs float32

    inputs: int
    outputs: int
    has_bias: bool = True
    # Ranks of a node that divide the rows of the gradient: each reduces its part over the nodes.
    owners: int = 1

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradient that one rank reduces."""
        return _GRADIENT_BYTES * self.outputs * (self.inputs + self.has_bias) / self.owners

    def factor_bytes(self, samples: int, item_bytes: int) -> int:
        """Return the bytes of the factors of one rank."""
        return samples * (self.inputs + self.outputs) * item_bytes

    def flop(self, samples: int) -> int:
        """Return the operations of the product over so many samples of a rank.

        The owners divide the rows, but each computes its rows over the samples of all owners.
        """
        return 2 * samples * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingShape:
    """An embedding: a table of which a sample looks up `positions` rows."""

    inputs: ClassVar[int] = 1
    owners: ClassVar[int] = 1
    has_indices: ClassVar[bool] = True

    rows: int
    outputs: int  # width of a row
    positions: int

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradient of the whole table."""
        return _GRADIENT_BYTES * self.rows * self.outputs

    def factor_bytes(self, samples: int, item_bytes: int) -> int:  # noqa: ARG002  (as in LinearShape)
        """Return the bytes of the factors of one rank."""
        return samples * self.positions * (_INDEX_BYTES + self.outputs * _GRADIENT_BYTES)

    def flop(self, samples: int) -> int:
        """Return the additions over so many samples of a rank."""
        return samples * self.positions * self.outputs


FactorShape = LinearShape | EmbeddingShape


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and seconds of one rank in a step."""

    sent_bytes: float
    seconds: float | None  # None: the speeds were not measured


def all_reduce_cost(shape: FactorShape, ranks: int, speeds: FactorSpeeds | None) -> Cost:
    """Return what the gradient of the layer adds to the all-reduce of others, in a ring.

    Its latency is not counted: gradients of several layers share a message.
    """
    ring, payload = all_reduce("ring", ranks), shape.gradient_bytes
    sent = ring.path * payload
    if speeds is None:
        return Cost(sent, None)
    return Cost(sent, ring.seconds(payload, 0.0, speeds.all_reduce_bytes_per_s))


def factor_cost(
    shape: FactorShape, samples: int, item_bytes: int, ranks: int, speeds: FactorSpeeds | None
) -> Cost:
    """Return the cost of gathering the factors in two messages, one of each factor, and of the
    part of the product that an all-reduce would not need: that of the other ranks' samples.

    samples: of one rank. item_bytes: of one element of a factor.
    """
    gather, payload = all_gather(ranks), shape.factor_bytes(samples, item_bytes)
    sent = gather.path * payload
    if speeds is None:
        return Cost(sent, None)
    flop = shape.flop(samples * (ranks - 1))
    return Cost(
        sent,
        # the second message has its own rounds
        gather.rounds * speeds.latency_s
        + gather.seconds(payload, speeds.latency_s, speeds.all_gather_bytes_per_s)
        + flop / speeds.product_flop_per_s,
    )
