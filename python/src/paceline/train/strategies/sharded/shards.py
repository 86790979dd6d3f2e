"""Shards of a model's tensors: rows of each, divided among all ranks as `fully_shard` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.torch_internals import all_gather_single
from paceline.train.training.file_memory import FileMemory
from paceline.train.training.state import Elements

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """The rows of a tensor that this rank owns. own: contiguous; perhaps without a row."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    own: Tensor

    @classmethod
    def of(cls, name: str, tensor: DTensor) -> ShardedTensor:
        """Return the shard of a tensor of `fully_shard`, in the same memory."""
        return cls(name, tuple(tensor.shape), tensor.to_local().detach())

    def rows_of(self, whole: Tensor) -> Tensor:
        """Return the rows of a whole tensor that this rank owns."""
        return whole[self._first : self._first + len(self.own)]

    def elements(self, values: Tensor) -> Elements:
        """Return the place of values, which have the shape of `own`, in the whole tensor."""
        strides = torch.empty(self.shape, device="meta").stride()
        start = self._first * strides[0]
        return Elements(
            name=self.name,
            shape=self.shape,
            strides=strides,
            start=start,
            values=values.detach().reshape(-1),
        )

    def gather(self, own: Tensor | None = None) -> Tensor:
        """Return the whole tensor; collective. own: values of this rank's rows, if others."""
        own = self.own if own is None else own
        padded = own.new_zeros((self._rows, *self.shape[1:]))
        padded[: len(own)] = own
        whole = own.new_empty((self._rows * dist.get_world_size(), *self.shape[1:]))
        all_gather_single(whole, padded)
        return whole[: self.shape[0]]

    @property
    def _rows(self) -> int:
        """Rows of a rank; the last ranks may have less."""
        return -(-self.shape[0] // dist.get_world_size())

    @property
    def _first(self) -> int:
        return min(self._rows * dist.get_rank(), self.shape[0])


@torch.no_grad()
def gathered(
    shards: Mapping[str, ShardedTensor], values: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return whole tensors by name, of which only one at a time is in memory; collective.

    values: of this rank's rows, if others.
    """
    memory = FileMemory()
    own = {name: shard.own for name, shard in shards.items()} if values is None else values
    return {name: memory.copy_of(shards[name].gather(tensor)) for name, tensor in own.items()}
