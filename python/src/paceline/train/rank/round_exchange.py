"""The exchange between two rounds, without torch: the messages between driver and tasks, and the
rows about it, which are written when the later round begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.base.host.machine import ClockOffset
from paceline.measure.records.communication import StrategyResult
from paceline.measure.records.files import JsonlWriter, read_json, write_json
from paceline.measure.records.layout import RankFiles
from paceline.measure.records.rows import CommunicationRow, StepRow

GROUP, OPERATION = "spark-rounds", "round"

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
class Orders:
    """The driver's message to all tasks of a round, without the weights."""

    number: int  # of the round, from 0
    carries: Mapping[int, Carry] = field(default_factory=dict)  # by rank; none in the first round
    finish: bool = False  # take the weights and end, without a step
    clocks: Mapping[int, ClockOffset] = field(default_factory=dict)  # by rank, at the end
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundExchange:
    """The exchange at the end of a round: weights go to the driver and return averaged."""

    number: int  # of the round before it
    ranks: int
    state_bytes: int
    ended_unix_s: float  # this rank has received the averaged state


def write_exchange(files: RankFiles, step: StepRow, exchange: RoundExchange) -> None:
    """Complete the round's last step, which includes the exchange, and record the operation.

    The exchange lasts from the end of the step's own work, on this clock, until the next task has
    the weights. Spark's scheduling and the other tasks' steps are part of it. It is 0 s if the rank
    continues on a host whose clock is behind.
    """
    stepped_unix_s = step.started_unix_s + step.step_s
    exchange_s = max(0.0, exchange.ended_unix_s - stepped_unix_s)
    row = dataclasses.replace(
        step, comm_s=exchange_s, comm_ready_unix_s=stepped_unix_s, step_s=step.step_s + exchange_s
    )
    operation = CommunicationRow(
        group=GROUP,
        ranks=exchange.ranks,
        sequence=exchange.number,
        operation=OPERATION,
        algorithm="tree",
        payload_bytes=exchange.state_bytes,
        arrived_unix_s=stepped_unix_s,
        started_unix_s=None,
        ended_unix_s=stepped_unix_s + exchange_s,
        sent_bytes=exchange.state_bytes,
        sent_messages=1,
    )
    with JsonlWriter(files.steps) as steps, JsonlWriter(files.communication) as operations:
        steps.write(row)
        operations.write(operation)


def set_clock(files: RankFiles, clock: ClockOffset) -> None:
    """Write a rank's clock to its environment: it is most accurate after all rounds."""
    environment = read_json(files.environment)
    known = {"clock_offset_s": clock.offset_s, "clock_error_s": clock.error_s}
    write_json(files.environment, {**environment, **known})
