"""Rows and documents of trials and ranks with usual values, which keywords replace."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from paceline.analysis.trial.recovery import Recovery
from paceline.collectives.host import Process, host_name
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import (
    SCHEMA,
    CommunicationRow,
    Failure,
    Outcome,
    RankStatus,
    StepRow,
)

STEP = StepRow(
    step=0, epoch=0, started_unix_s=1000.0, samples=8, global_samples=16, loss_sum=4.0,
    data_wait_s=0.0, forward_s=0.25, backward_s=0.25, comm_s=None, comm_ready_unix_s=None,
    optimizer_s=0.0, other_s=0.0, step_s=0.5,
)  # fmt: skip
OPERATION = CommunicationRow(
    group="world", ranks=2, sequence=0, operation="allreduce", algorithm="ring",
    payload_bytes=4000, arrived_unix_s=1000.0, started_unix_s=1000.0, ended_unix_s=1000.5,
    sent_bytes=4000, sent_messages=2,
)  # fmt: skip
ENDED_WELL = Outcome(
    schema=SCHEMA, trial_id="t", status="ok", exit_code=0, launched_unix_s=0.0, ended_unix_s=1.0,
    launcher_exit_status=0, failed_rank=None, message=None,
)  # fmt: skip


def survived(kind: str | None, restore_s: float) -> Recovery:
    """Return a failure of this kind from which a trial has recovered."""
    return Recovery(
        kind=kind, failed_rank=0, steps_done=5, resumed_steps=4, lost_work_s=1.0, detect_s=0.1,
        restart_s=0.2, restore_s=restore_s, next_step_s=0.3,
    )  # fmt: skip


def failure(text: str, rank: int = 0, host: str | None = None) -> Failure:
    """Return the failure that is shown as `text`, `DataError: image 3 …`."""
    kind, _, message = text.partition(": ")
    return Failure(kind=kind, message=message, rank=rank, host=host)


def running_rank(rank: int, pid: int | None = None, **changes: Any) -> RankStatus:
    """Return the status of a rank that is a process of this host, by default this process.

    An error may be given as text.
    """
    if isinstance(changes.get("error"), str):
        changes["error"] = failure(changes["error"], rank, changes.get("host", host_name()))
    number = os.getpid() if pid is None else pid
    process = Process.of(number)
    known = {"pid": number} if process is None else dataclasses.asdict(process)
    usual = {"host": host_name(), "process_started_unix_s": 0.0, "state": "running"}
    return RankStatus(rank=rank, **{**usual, **known, **changes})


def write_status(
    files: TrialFiles,
    rank: int,
    state: str = "running",
    error: str | Failure | None = None,
    **changes: Any,
) -> None:
    """Write the status that `running_rank` returns."""
    write_json(files.rank(rank).status, running_rank(rank, state=state, error=error, **changes))
