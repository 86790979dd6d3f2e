"""The messages between driver and tasks in a round: plain values, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.records.communication import StrategyResult
from paceline.records.rows import StepRow

# Weights, then momentum if there is any: shape (elements,), float32.
State = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """The facts that the next task of a rank needs from its last one."""

    host: str
    process_started_unix_s: float  # of the rank's first task
    train_started_unix_s: float
    last_step: StepRow  # of the round; its row still lacks the exchange that follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A rank's clock relative to rank 0's, as in RankEnvironment."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The driver's message to all tasks of a round, without the weights."""

    number: int  # of the round, from 0
    carries: Mapping[int, Carry] = field(default_factory=dict)  # by rank; none in the first round
    finish: bool = False  # take the weights and end, without a step
    clocks: Mapping[int, Clock] = field(default_factory=dict)  # by rank, at the end
    facts: StrategyResult = field(default_factory=StrategyResult)  # for the result, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The message of one task to the driver, without the weights."""

    host: str
    cores: str  # RankCores as JSON
    executor: str | None = None  # Spark's name for it, None with a local master
    carry: Carry | None = None  # None when the rank has finished
    next_step: int  # the first that is not done
    steps: int  # of the whole training
    moved: bool = False  # another process was this rank before
    task_unix_s: tuple[float, float] | None = None  # began and ended, on its host's clock


@dataclass(slots=True, kw_only=True)
class Report:
    """The message of one task, or the sum of several."""

    ranks: dict[int, RankReport]
    total: State | None = None  # sum of the tasks' states, each weighted by its part of the samples


def together(one: Report, other: Report) -> Report:
    """Return the sum of two reports, in the memory of the first."""
    total = one.total if one.total is not None else other.total
    if one.total is not None and other.total is not None:
        np.add(one.total, other.total, out=one.total)
    return Report(ranks={**one.ranks, **other.ranks}, total=total)


def steps_of_round(number: int, period: int, steps: int) -> range:
    """Return the global steps of round `number`; the last round may have fewer than `period`."""
    first = number * period
    return range(min(first, steps), min(first + period, steps))
