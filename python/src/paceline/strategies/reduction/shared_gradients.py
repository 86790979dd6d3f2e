"""Gradients in shared memory that other processes of the node read."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard


class SharedGradients:
    """One worker's gradients of the shards that other workers own.

    The worker writes them during its backward pass, and the others read them after a barrier. Both
    sides construct this object over the same memory.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shards_by_worker: Sequence[Sequence[ParameterShard]],
        worker: int,
        memory: Tensor,
    ) -> None:
        """memory: float32, shape (elements_needed(…),)."""
        self._layout = layout
        self._places: dict[ParameterShard, Tensor] = {}
        position = 0
        for shard in _shards_of_others(shards_by_worker, worker):
            self._places[shard] = memory[position : position + shard.elements]
            position += shard.elements
        self._owned = {shard.name for shard in shards_by_worker[worker]}
        self._is_complete = True

    @staticmethod
    def elements_needed(shards_by_worker: Sequence[Sequence[ParameterShard]], worker: int) -> int:
        """Return the number of float32 elements of the memory: all elements that others own."""
        return sum(s.elements for s in _shards_of_others(shards_by_worker, worker))

    def write_in_backward(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Write each gradient as soon as the last backward pass of a step has computed it.

        A gradient of which the worker owns no shard is released, so that its memory is reused.
        """
        for name in {shard.name for shard in self._places} | self._owned:
            hook = partial(self._write_and_release, name)
            parameters[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Write no gradients meanwhile, because a later pass adds to them."""
        self._is_complete = False
        try:
            yield
        finally:
            self._is_complete = True

    def write(self, name: str, gradient: Tensor) -> None:
        """Copy the shards that others own; they must have read those of the previous step."""
        flat = self._layout.in_storage_order(name, gradient)
        for shard, place in self._places.items():
            if shard.name == name:
                place.copy_(flat[shard.start : shard.stop])

    def read(self, shard: ParameterShard) -> Tensor:
        """Return this worker's gradient of a shard that it does not own, shape (stop - start,)."""
        return self._places[shard]

    def _write_and_release(self, name: str, parameter: nn.Parameter) -> None:
        if not self._is_complete:
            return
        assert parameter.grad is not None
        self.write(name, parameter.grad)
        if name not in self._owned:
            parameter.grad = None


def _shards_of_others(
    shards_by_worker: Sequence[Sequence[ParameterShard]], worker: int
) -> Iterator[ParameterShard]:
    for other, shards in enumerate(shards_by_worker):
        if other != worker:
            yield from shards
