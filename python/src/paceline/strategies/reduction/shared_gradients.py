"""Gradients that other processes of the node will read, in memory that they share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from paceline.strategies.reduction.flat_layout import FlatLayout, ParameterShard


class SharedGradients:
    """What one worker computed of the parts that others own.

    It writes them, as its backward pass goes, and the others read them once all have met. The same
    object made over the same memory serves writing and reading.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shares: Sequence[Sequence[ParameterShard]],
        worker: int,
        memory: Tensor,
    ) -> None:
        """shares: parts by worker. memory: float32, shape (elements_needed(…),)."""
        self._layout = layout
        self._places: dict[ParameterShard, Tensor] = {}
        position = 0
        for part in _of_others(shares, worker):
            elements = part.stop - part.start
            self._places[part] = memory[position : position + elements]
            position += elements
        self._kept = {part.name for part in shares[worker]}

    @staticmethod
    def elements_needed(shares: Sequence[Sequence[ParameterShard]], worker: int) -> int:
        """Float32 elements of the memory: as many as the others own."""
        return sum(part.stop - part.start for part in _of_others(shares, worker))

    def fill_in_backward(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """From now on put each gradient as soon as a backward pass has made it, and drop it if the
        worker owns nothing of it: its memory serves the next one."""
        for name in {part.name for part in self._places} | self._kept:
            hook = partial(self._put_and_drop, name)
            parameters[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def put(self, name: str, gradient: Tensor) -> None:
        """Copy what others own of a parameter's gradient; the others must have read the last."""
        flat = self._layout.in_storage_order(name, gradient)
        for part, place in self._places.items():
            if part.name == name:
                place.copy_(flat[part.start : part.stop])

    def read(self, part: ParameterShard) -> Tensor:
        """This worker's gradient of a part that it does not own, shape (stop - start,)."""
        return self._places[part]

    def _put_and_drop(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.put(name, parameter.grad)
        if name not in self._kept:
            parameter.grad = None


def _of_others(shares: Sequence[Sequence[ParameterShard]], worker: int) -> Iterator[ParameterShard]:
    for other, parts in enumerate(shares):
        if other != worker:
            yield from parts
