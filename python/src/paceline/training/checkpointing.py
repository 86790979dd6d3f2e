"""Activation checkpointing: the backward pass computes activations again instead of storing them.

The blocks of a model (`Task.blocks`) are joined into segments. Only the inputs of segments are
stored. In the backward pass each segment is computed a second time, which gives the tensors that
its own backward pass needs (Chen et al.: Training Deep Nets with Sublinear Memory Cost, 2016,
arXiv:1604.06174). The last segment is not computed again if its backward pass follows immediately.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.training.recomputation import RecomputedPass
from paceline.training.segments import choose_segments, stored_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial
    from paceline.training.segments import BlockBytes
    from paceline.training.task import Task


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
