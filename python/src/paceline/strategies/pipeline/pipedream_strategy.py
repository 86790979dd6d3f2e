"""A pipeline that is never drained, with weight stashing; see pipedream.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.strategies.pipeline.partition import settings_of
from paceline.strategies.pipeline.pipedream import StreamPlace, StreamStage
from paceline.strategies.pipeline.strategy import PipelineStrategy, Place

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial
    from paceline.records.communication import StrategyResult
    from paceline.records.rows import UpdateRow
    from paceline.strategies.pipeline.links import SplitPoint
    from paceline.strategies.pipeline.split_points import Layers
    from paceline.training.state import SavedState
    from paceline.training.strategy import GradientResult, RankGroups, TrainBatch
    from paceline.training.task import Task


class PipeDreamStrategy(PipelineStrategy):
    """One stage, which updates its weights within `gradient`."""

    pauses_for_checkpoints = True

    def __init__(self) -> None:
        super().__init__()
        self._stream: StreamStage
        self._place: StreamPlace
        self._stage_bytes = 0  # weights of the stage
        self._steps = 0  # whose passes have begun

    def prepare(
        self, task: Task, model: nn.Module, context: RankContext, trial: Trial, peers: RankGroups
    ) -> None:
        """Raises UsageError, beside what a pipeline raises, if stages that were balanced by
        measured times share a parameter."""
        super().prepare(task, model, context, trial, peers)
        if self._has_ties:
            raise UsageError(
                'schedule: with "pipedream" a parameter belongs to one stage, but stages share '
                'one; use "1f1b", or other split_points'
            )
        self._stage_bytes = 4 * self._weights.elements
        self._stream.update(self._weights)

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Run the passes of the step; the weights change after each micro-batch.

        The time of the updates is a part of backward_s.
        """
        result = self._stream.run(batch)
        self._steps = batch.step + 1
        return result

    def step(self) -> None:
        """Do nothing: `gradient` has updated the weights."""

    def gradients(self) -> dict[str, Tensor]:
        """Return none: there is no gradient of a whole batch."""
        return {}

    def updates(self) -> list[UpdateRow]:
        return self._stream.take_rows()

    def settle(self) -> None:
        """Finish the micro-batches in flight. The next step begins as the first one does."""
        self._stream.drain(self._steps)

    def restore(self, saved: SavedState) -> None:
        self._steps = saved.steps
        self._stream.begin_after(saved.steps)
        super().restore(saved)

    def describe(self) -> StrategyResult:
        """Return the settings; stashed weights are those of this rank's stage."""
        copies = self._stream.stashed_versions
        return {
            **super().describe(),
            "vertical_sync": self._place.vertical_sync,
            "stashed_versions": copies,
            "stashed_bytes": copies * self._stage_bytes,
        }

    def _open_stage(
        self,
        layers: Layers,
        place: Place,
        before: SplitPoint | None,
        after: SplitPoint | None,
        trial: Trial,
        device: torch.device,  # noqa: ARG002  (planning admits the CPU only)
    ) -> None:
        settings = settings_of(trial)
        self._place = StreamPlace(
            stage=place.stage,
            stages=place.stages,
            micro_batches=settings.micro_batches,
            vertical_sync=settings.vertical_sync,
        )
        self._stream = StreamStage(self._task, layers, self._place, before, after, trial.training)
