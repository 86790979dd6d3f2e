"""Sums through a codec: gradients travel encoded, and are added up decoded.

    every rank encodes its n parts of the bucket and sends the k-th to rank k   (all-to-all)
    rank k decodes what it got and adds it up, in float32, in the order of the ranks
    rank k encodes the sum and sends it to all                                  (all-gather)
    every rank decodes the n sums

Each rank sends 2 (n - 1) / n times the encoded bucket, as a bandwidth-optimal all-reduce of it
does; but the sum keeps float32's bits, whatever the type on the wire, and no transport needs to
know how to add encoded numbers (Open MPI adds 16-bit types as 32-bit ones, and sends those). All
ranks decode the same bytes, so all have the same bits.

Between two ranks as much is sent if each simply gets the other's whole bucket (an all-gather) and
adds the two up itself, in the order of the ranks: one message less to wait for, and the sum is not
encoded again. So it is done there, and where a transport has no other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from paceline.transports.compression.base import all_gather_bytes, bytes_of, exchange_bytes
from paceline.transports.compression.collectives import all_gather, all_to_all
from paceline.transports.compression.residuals import Residuals

if TYPE_CHECKING:
    from paceline.transports.compression.base import Bucket


class Codec(Protocol):
    """Float32 numbers as fewer bytes. Encoding twice gives the same bytes."""

    name: str
    block: int  # a part has a multiple of so many elements
    feeds_back: bool  # whether what it loses is worth being sent with the next step

    def encode(self, parts: Tensor) -> Tensor:
        """parts: shape (m, elements). Returns uint8, shape (m, bytes): each part by itself."""

    def decode(self, encoded: Tensor) -> Tensor:
        """Shape (m, elements), a new tensor."""

    def describe(self) -> dict[str, Any]:
        """Its settings."""


class CodecCompressor:
    """A compressor of a codec."""

    def __init__(
        self, codec: Codec, group: dist.ProcessGroup | None = None, *, all_to_all: bool = True
    ) -> None:
        """all_to_all: whether the group has one."""
        self.name = codec.name
        self._codec = codec
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._in_parts = all_to_all and self._ranks > 2
        self._residuals = Residuals() if codec.feeds_back else None

    def sum(self, bucket: Bucket) -> float:
        flat = bucket.buffer()
        residual = None if self._residuals is None else self._residuals.of(bucket)
        if residual is not None:
            flat.add_(residual)
        return (self._sum_parts if self._in_parts else self._sum_all)(flat, residual)

    def _sum_all(self, flat: Tensor, residual: Tensor | None) -> float:
        encoded = self._codec.encode(self._parts(flat, 1))
        if residual is not None:
            torch.sub(flat, self._codec.decode(encoded).view(-1)[: flat.numel()], out=residual)
        gathered = all_gather(encoded.view(-1), self._group)
        first, *others = self._codec.decode(gathered)
        for other in others:
            first += other
        flat.copy_(first[: flat.numel()])
        return all_gather_bytes(bytes_of(encoded), self._ranks)

    def _sum_parts(self, flat: Tensor, residual: Tensor | None) -> float:
        encoded = self._codec.encode(self._parts(flat, self._ranks))
        received = all_to_all(encoded, self._group)
        total = self._codec.decode(received).sum(dim=0, keepdim=True)
        own = self._codec.encode(total)
        if residual is not None:
            self._keep(residual, flat, encoded, total - self._codec.decode(own))
        gathered = all_gather(own.view(-1), self._group)
        flat.copy_(self._codec.decode(gathered).view(-1)[: flat.numel()])
        return exchange_bytes(bytes_of(encoded), self._ranks) + all_gather_bytes(
            bytes_of(own), self._ranks
        )

    def describe(self) -> dict[str, Any]:
        return {**self._codec.describe(), "error_feedback": self._codec.feeds_back}

    def _parts(self, flat: Tensor, parts: int) -> Tensor:
        """Parts of one size, shape (parts, elements); padded with zeros."""
        each = -(-flat.numel() // parts)
        each += -each % self._codec.block
        missing = each * parts - flat.numel()
        return (pad(flat, (0, missing)) if missing else flat).view(parts, each)

    def _keep(self, residual: Tensor, flat: Tensor, encoded: Tensor, lost: Tensor) -> None:
        """What was lost of this rank's gradients, and of the sum that it encoded for all.

        The second goes to the rank that lost it: sent with its own gradients, it comes back to the
        same sum (as in DoubleSqueeze, Tang et al., ICML 2019).
        """
        torch.sub(flat, self._codec.decode(encoded).view(-1)[: flat.numel()], out=residual)
        each = lost.numel()
        place = residual[self._rank * each : (self._rank + 1) * each]
        place.add_(lost.view(-1)[: place.numel()])
