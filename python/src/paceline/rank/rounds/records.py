"""The rows of the exchange between two rounds; they are written when the later round begins."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.records.files import JsonlWriter, read_json, write_json
from paceline.records.rows import CommunicationRow

if TYPE_CHECKING:
    from paceline.rank.rounds.exchange import Clock
    from paceline.records.layout import RankFiles
    from paceline.records.rows import StepRow

GROUP = "spark-rounds"
OPERATION = "round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The exchange at the end of a round: weights go to the driver and return averaged."""

    number: int  # of the round before it
    ranks: int
    state_bytes: int
    ended_unix_s: float  # this rank has received the averaged state


def write_exchange(files: RankFiles, step: StepRow, exchange: Exchange) -> None:
    """Complete the round's last step, which includes the exchange, and record the operation.

    The exchange lasts from the end of the step's own work, on this clock, until the next task has
    the weights. Spark's scheduling and the other tasks' steps are part of it. It is 0 s if the rank
    continues on a host whose clock is behind.
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
    """Write a rank's clock to its environment: it is most accurate after all rounds."""
    environment = read_json(files.environment)
    known = {"clock_offset_s": clock.offset_s, "clock_error_s": clock.error_s}
    write_json(files.environment, {**environment, **known})
