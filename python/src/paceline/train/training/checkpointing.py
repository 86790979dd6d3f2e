"""Activation checkpointing: the backward pass computes activations again instead of storing them.

The blocks of a model (`Task.blocks`) are joined into segments. Only the inputs of segments are
stored. In the backward pass each segment is computed a second time, which gives the tensors that
its own backward pass needs (Chen et al.: Training Deep Nets with Sublinear Memory Cost, 2016,
arXiv:1604.06174). The last segment is not computed again if its backward pass follows immediately.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.base.errors import UsageError
from paceline.base.torch_internals import buffers_of, storage_number
from paceline.plan.trials.trial import Trial
from paceline.train.training.dropout import set_sample_keys
from paceline.train.training.graph_blocks import Blocks
from paceline.train.training.task import Task

# Compute a part of a forward pass a second time, with the same result and no further effects
#
# The second computation uses the dropout masks of the first one and changes no buffers. What must
# happen only once, for example a sum over replicas, uses `once`.

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


_SAMPLES = 2  # the least for which every layer has batch statistics


def checkpoint_activations(task: Task, model: nn.Module, trial: Trial) -> None:
    """Make the model compute its activations again in the backward pass, if the trial requests it.

    Only `model.forward` is replaced: parameters and buffers keep their names. The stages of a
    pipeline use `Segments` for their own blocks.
    Raises UsageError if the model cannot be divided into blocks.
    """
    if not trial.training.activation_checkpointing or trial.placement.stages > 1:
        return
    try:
        blocks = task.blocks(model)
    except UsageError as error:
        raise UsageError(f"activation_checkpointing: {error}") from None
    model.forward = Segments.of(stored_bytes(task, blocks), [block for _, block in blocks])


class Segments:
    """Consecutive segments of a model. Calling them is its forward pass."""

    def __init__(self, segments: Sequence[Sequence[nn.Module]], *, keeps_last: bool) -> None:
        """keeps_last: the last segment is not computed again."""
        self.segments = [_Segment(blocks) for blocks in segments]
        self._keeps_last = keeps_last

    @classmethod
    def of(
        cls,
        stored: Sequence[BlockBytes],
        blocks: Sequence[nn.Module],
        *,
        passes_in_flight: int = 1,
    ) -> Segments:
        """Divide `blocks` so that they need the least memory.

        stored: bytes of each block. passes_in_flight: largest number of forward passes whose
        backward pass has not begun.
        """
        legal = [not getattr(block, "inplace", False) for block in blocks]
        begins = choose_segments(stored, legal, passes_in_flight)
        bounds = zip(begins, [*begins[1:], len(blocks)], strict=True)
        segments = [blocks[low:high] for low, high in bounds]
        return cls(segments, keeps_last=passes_in_flight == 1)

    def __call__(self, inputs: Tensor) -> Tensor:
        *earlier, last = self.segments
        for segment in earlier:
            inputs = segment.recomputed_later(inputs)
        return last(inputs) if self._keeps_last else last.recomputed_later(inputs)


class _Segment:
    """Consecutive blocks that are computed again together."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)

    def __call__(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs

    def recomputed_later(self, inputs: Tensor) -> Tensor:
        contexts = RecomputedPass(self.blocks).contexts
        output: Tensor = checkpoint(self, inputs, use_reentrant=False, context_fn=contexts)
        return output


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of a block's tensors for a few samples."""

    inputs: int
    stored: int  # for the backward pass, by this block first; without parameters and buffers


def stored_bytes(task: Task, model: Blocks) -> list[BlockBytes]:
    """Return the bytes that each block of a model stores, by a pass of two samples; changes
    nothing. The model is on the CPU."""
    found = []
    stored: list[Tensor] = []  # alive until the end, so that every storage has a number of its own
    blocks = [block for _, block in model]

    def keep(tensor: Tensor) -> Tensor:
        stored.append(tensor)
        return tensor

    value = torch.cat([task.example_input()] * _SAMPLES)
    with RecomputedPass(blocks).second():
        known = {storage_number(w) for b in blocks for w in (*b.parameters(), *b.buffers())}
        for block in blocks:
            set_sample_keys(block, 0, 0, range(_SAMPLES))
            inputs, before = value, len(stored)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                value = block(inputs)
            new = {storage_number(tensor): _size(tensor) for tensor in stored[before:]}
            found.append(BlockBytes(_size(inputs), sum(new[key] for key in new.keys() - known)))
            known |= new.keys()
    return found


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def choose_segments(
    blocks: Sequence[BlockBytes], legal: Sequence[bool], passes_in_flight: int = 1
) -> list[int]:
    """Return the first block of each segment, ascending; the first is 0.

    The memory of a step is that of the inputs of all segments, for each pass in flight, and of the
    largest segment, which is stored while its backward pass runs. The first input exists anyway.
    legal: whether a segment may begin at a block; one that works in place would change its input.
    """
    places = [0, *(i for i in range(1, len(blocks)) if legal[i])]
    sizes = [
        sum(block.stored for block in blocks[low:high])
        for low, high in itertools.pairwise([*places, len(blocks)])
    ]
    limits = {
        sum(sizes[low:high]) for low, high in itertools.combinations(range(len(sizes) + 1), 2)
    }
    divisions = [_filled(sizes, limit) for limit in sorted(limits) if limit >= max(sizes)]

    def cost(begins: list[int]) -> tuple[int, int]:
        inputs = sum(blocks[places[begin]].inputs for begin in begins[1:])
        ends = [*begins[1:], len(sizes)]
        largest = max(sum(sizes[low:high]) for low, high in zip(begins, ends, strict=True))
        return passes_in_flight * inputs + largest, len(begins)

    return [places[begin] for begin in min(divisions, key=cost)]


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the begins of as few consecutive groups as possible, none larger than `limit`."""
    begins, total = [0], 0
    for number, size in enumerate(sizes):
        if number > 0 and total + size > limit:
            begins.append(number)
            total = 0
        total += size
    return begins
