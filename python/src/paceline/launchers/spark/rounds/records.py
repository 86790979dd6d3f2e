"""The rows of what lies between two rounds: written when the later one begins."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.records.files import JsonlWriter, read_json, write_json
from paceline.records.rows import CommunicationRow

if TYPE_CHECKING:
    from paceline.launchers.spark.rounds.exchange import Clock
    from paceline.records.layout import RankFiles
    from paceline.records.rows import StepRow

GROUP = "spark-rounds"
OPERATION = "round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The end of a round: weights go to the driver and come back averaged."""

    number: int  # of the round that it ends
    ranks: int
    state_bytes: int
    ended_unix_s: float  # when this rank had the averaged state


def write_exchange(files: RankFiles, step: StepRow, exchange: Exchange) -> None:
    """Complete the round's last step, which the exchange belongs to, and record the operation.

    It lasted from the end of the step's own work, on this clock, until the next task had the
    weights: Spark's scheduling and the other tasks' steps are part of it. Should a rank go on
    upon another host, whose clock is behind, it took no time at least.
    """
    stepped_unix_s = step.started_unix_s + step.step_s
    exchange_s = max(0.0, exchange.ended_unix_s - stepped_unix_s)
    row = dataclasses.replace(
        step,
        comm_s=exchange_s,
        comm_ready_unix_s=stepped_unix_s,
        step_s=step.step_s + exchange_s,
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


def set_clock(files: RankFiles, clock: Clock) -> None:
    """Put a rank's clock into its environment: it is known best when all rounds are over."""
    environment = read_json(files.environment)
    known = {"clock_offset_s": clock.offset_s, "clock_error_s": clock.error_s}
    write_json(files.environment, {**environment, **known})
