"""Activation checkpointing: the backward pass computes activations again instead of storing them.

The blocks of a model (`Task.blocks`) are joined into segments. Only the inputs of segments are
stored. In the backward pass each segment is computed a second time, which gives the tensors that
its own backward pass needs (Chen et al.: Training Deep Nets with Sublinear Memory Cost, 2016,
arXiv:1604.06174). The last segment is not computed again if its backward pass follows immediately.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.base.errors import UsageError
from paceline.base.torch_internals import storage_number
from paceline.plan.trials.trial import Trial
from paceline.train.training.dropout import set_sample_keys
from paceline.train.training.graph_blocks import Blocks
from paceline.train.training.recomputation import RecomputedPass
from paceline.train.training.task import Task

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
