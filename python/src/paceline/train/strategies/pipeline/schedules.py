"""Pipeline schedules: the order of a stage's passes in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.train.strategies.pipeline.descriptor import PipelineSchedule


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward pass of one micro-batch."""

    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward pass of one micro-batch, some time after its forward pass."""

    micro_batch: int


Action = Forward | Backward


def actions(
    schedule: PipelineSchedule, stage: int, stages: int, micro_batches: int
) -> list[Action]:
    """Return the stage's actions of one step in order; micro-batches are in ascending order.

    `gpipe` runs all forward passes, then all backward passes, so a stage holds the activations of
    all m micro-batches. `1f1b` runs s - 1 - stage forward passes, then alternates one forward and
    one backward pass, so it holds those of s - stage micro-batches. Both have the same idle time.
    """
    ahead = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
    result: list[Action] = [Forward(i) for i in range(ahead)]
    for i in range(ahead, micro_batches):
        result += [Forward(i), Backward(i - ahead)]
    return result + [Backward(i) for i in range(micro_batches - ahead, micro_batches)]


def passes_in_flight(actions_of_stage: Sequence[Action]) -> int:
    """Return the largest number of micro-batches between their forward and backward passes."""
    signs = (1 if isinstance(action, Forward) else -1 for action in actions_of_stage)
    return max(accumulate(signs))


def stream_actions(
    ahead: int, micro_batches: int, step: int, *, drained_before: int = 0
) -> list[Action]:
    """Return a stage's actions of a step in a pipeline that is not drained between two steps.

    The order is that of `1f1b`. Micro-batches are counted over all steps; those that are in flight
    at the end of a step end in the next one, or in a drain (`drain_actions`).
    ahead: micro-batches whose forward passes precede the backward pass of an earlier one.
    drained_before: the first micro-batch since the last drain.
    """
    first = step * micro_batches
    result: list[Action] = []
    for i in range(first, first + micro_batches):
        result.append(Forward(i))
        if i - ahead >= drained_before:
            result.append(Backward(i - ahead))
    return result


def drain_actions(ahead: int, end: int, *, drained_before: int = 0) -> list[Action]:
    """Return a stage's backward passes of the micro-batches before `end` that are in flight; see
    `stream_actions`."""
    return [Backward(i) for i in range(max(drained_before, end - ahead), end)]
