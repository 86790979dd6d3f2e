"""Bytes and time of the two ways to give all ranks the gradient of a layer.

The gradient can be summed by an all-reduce. Or the ranks gather its sufficient factors (the inputs
of the layer and the gradients of its outputs), and each computes the product over the samples of
all. Factors are smaller if the layer is large and the samples of a rank are few. (Zhang et al.:
Poseidon, USENIX ATC 2017, chooses by bytes; Xie et al.: Lighter-Communication Distributed Machine
Learning via Sufficient Factor Broadcasting, UAI 2016.) Here the choice also counts the latency of
messages and the time of the larger product.

Only arithmetic: every rank computes the same decision from the same measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.plan.costs.link_cost import all_gather, all_reduce

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
