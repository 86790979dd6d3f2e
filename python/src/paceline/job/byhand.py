"""A trial started by hand keeps the records that `paceline run` keeps otherwise.

So that `paceline compare RUN_DIR` and `paceline report RUN_DIR` read both alike. One process of
the trial calls `prepare` before any rank starts, and `finish` after the end.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING, Literal

from paceline.errors import ExitCode, UsageError
from paceline.host.machine import machine_facts, package_versions
from paceline.host.processes import command_line_of, parent_of, process_started_unix_s
from paceline.records.attempts import set_aside
from paceline.records.files import read_json, write_json, write_text
from paceline.records.rows import SCHEMA, Outcome

if TYPE_CHECKING:
    from paceline.job.options import Job
    from paceline.job.rank import RankEnd

# Programs that start ranks as their children; the interpreter itself is the launcher otherwise.
_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "java", "torchrun", "torch.distributed.run")
_SPARK_SUBMIT = "org.apache.spark.deploy.SparkSubmit"


def prepare(job: Job) -> None:
    """Make the trial's directory with `trial.json` and `command.txt`, and the run's manifest.

    What an unfinished attempt left is moved to `attempts/`. Does nothing under `paceline run`.
    Raises UsageError if the trial is there and finished.
    """
    if job.run is None:
        return
    if job.files.outcome.exists() and read_json(job.files.outcome).get("status") == "ok":
        raise UsageError(
            f"{job.files.root}: this trial is finished already; add --repeat {_next_repeat(job)} "
            "to repeat it, or choose another --out"
        )
    set_aside(job.run, job.trial.id)
    if not job.run.manifest.exists():
        write_json(job.run.manifest, _manifest(job))
    write_text(job.files.command, _command_line() + "\n")
    write_text(job.files.trial, job.trial.model_dump_json(indent=1) + "\n")


def finish(job: Job, end: RankEnd) -> None:
    """Write how the trial ended, as the rank saw it that ended it. Not under `paceline run`."""
    if job.managed:
        return
    outcome = Outcome(
        schema=SCHEMA,
        trial_id=job.trial.id,
        status=_status(end.exit_code),
        exit_code=end.exit_code,
        launched_unix_s=launched_unix_s(),
        ended_unix_s=time.time(),
        launcher_exit_status=None,  # the launcher ends after us
        failed_rank=None if end.error is None else end.rank,
        message=end.error,
    )
    write_json(job.files.outcome, dataclasses.asdict(outcome))


def launching_pid() -> int:
    """The process that was started by hand: the launcher if it is our parent, else we ourselves."""
    parent = parent_of(os.getpid())
    if parent is None:
        return os.getpid()
    words = command_line_of(parent)
    names = {word.rpartition("/")[2] for word in words[:3]}  # `python -m torch.distributed.run`
    return parent if names & set(_LAUNCHERS) else os.getpid()


def launched_unix_s() -> float:
    """When the process started that was started by hand."""
    started = process_started_unix_s(launching_pid())
    return time.time() if started is None else started


def _command_line() -> str:
    words = command_line_of(launching_pid()) or [sys.executable, *sys.argv]
    if _SPARK_SUBMIT in words:  # spark-submit becomes `java … SparkSubmit` and the same options
        words = ["spark-submit", *words[words.index(_SPARK_SUBMIT) + 1 :]]
    return shlex.join(words)


def _next_repeat(job: Job) -> int:
    assert job.run is not None
    prefix = f"{job.trial.configuration}.r"
    taken = [
        int(name.removeprefix(prefix))
        for name, _ in job.run.trials()
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    ]
    return max(taken, default=-1) + 1


def _manifest(job: Job) -> dict[str, object]:
    training = job.trial.training
    return {
        "schema": SCHEMA,
        "name": job.trial.experiment,
        "description": "trials started by hand",
        "by_hand": True,
        "created_unix_s": time.time(),
        "data": {training.workload: training.dataset},
        "versions": package_versions(),
        "host": machine_facts(),
    }


def _status(exit_code: int) -> Literal["ok", "failed", "timed_out", "refused"]:
    if exit_code == ExitCode.OK:
        return "ok"
    if exit_code == ExitCode.TIMED_OUT:
        return "timed_out"
    refusals = (ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DATA)
    return "refused" if exit_code in refusals else "failed"
