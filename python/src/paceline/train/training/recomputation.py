"""Compute a part of a forward pass a second time, with the same result and no further effects.

The second computation uses the dropout masks of the first one and changes no buffers. What must
happen only once, for example a sum over replicas, uses `once`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, nn

from paceline.base.torch_internals import buffers_of

T = TypeVar("T")

# Attributes of layers that hold for one pass: sample keys of dropout, and samples that do not count
# for batch statistics.
_OF_A_PASS = ("_keys", "paceline_excluded")


class RecomputedPass:
    """The state of some layers before a pass, which the second computation of the pass uses."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        layers = {id(layer): layer for block in blocks for layer in block.modules()}.values()
        self._attributes = [
            (layer, {n: layer.__dict__[n] for n in _OF_A_PASS if n in layer.__dict__})
            for layer in layers
        ]
        self._buffers = [
            (layer, name, buffer.clone())
            for layer in layers
            for name, buffer in buffers_of(layer).items()
            if buffer is not None
        ]
        self._results: list[Any] = []
        self._used: int | None = None  # results that the second computation has used

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._first(), self.second()

    def once(self, compute: Callable[[], T]) -> T:
        if self._used is None:
            self._results.append(compute())
            return self._results[-1]  # type: ignore[no-any-return]
        self._used += 1
        return self._results[self._used - 1]  # type: ignore[no-any-return]

    @contextmanager
    def _first(self) -> Iterator[None]:
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def second(self) -> Iterator[None]:
        """Give the layers that state meanwhile.

        Buffers are replaced instead of changed, because other passes may have saved them.
        """
        self._used = 0
        now = [(layer, {n: layer.__dict__[n] for n in old}) for layer, old in self._attributes]
        buffers = [(layer, name, buffers_of(layer)[name]) for layer, name, _ in self._buffers]
        _put(self._attributes, self._buffers)
        try:
            with self._first():
                yield
        finally:
            _put(now, buffers)


def _put(
    attributes: Sequence[tuple[nn.Module, dict[str, Any]]],
    buffers: Sequence[tuple[nn.Module, str, Tensor | None]],
) -> None:
    for layer, values in attributes:
        layer.__dict__.update(values)
    for layer, name, buffer in buffers:
        buffers_of(layer)[name] = buffer


_current: ContextVar[RecomputedPass | None] = ContextVar("paceline_segment", default=None)


def once(compute: Callable[[], T]) -> T:
    """Return `compute()`. If a segment is computed again, return the result of the first time."""
    segment = _current.get()
    return compute() if segment is None else segment.once(compute)
