"""The records that `paceline run` keeps, kept by a job that was started without it.

So `paceline compare RUN_DIR` and `paceline report RUN_DIR` read both alike. One process of the job
calls `prepare` before any rank starts, and `finish` after the end.
"""

from __future__ import annotations

import shlex
import sys
import time

from paceline.base.errors import ExitCode, UsageError
from paceline.base.host.machine import machine_facts, package_versions
from paceline.measure.records.attempts import set_aside
from paceline.measure.records.documents import read_statuses, write_trial
from paceline.measure.records.files import read_json, write_json, write_text
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import SCHEMA, Outcome
from paceline.runner.job.context import launched_unix_s
from paceline.runner.job.first_failure import outcome_status
from paceline.runner.job.job import Job
from paceline.runner.job.rank_status import RankEnd


def prepare(job: Job) -> None:
    """Make the trial's directory with `trial.json` and `command.txt`, and the run's manifest.

    The files of an unfinished attempt move to `attempts/`. Does nothing under `paceline run`.
    Raises UsageError if the trial has finished already.
    """
    if job.run is None:
        return
    if job.files.outcome.exists() and read_json(job.files.outcome).get("status") == "ok":
        raise UsageError(
            f"{job.files.root}: this trial has finished already; to repeat it add --repeat "
            f"{_next_repeat(job.run, job.trial.configuration)}, or choose another --out"
        )
    set_aside(job.run, job.trial)
    if not job.run.manifest.exists():
        write_json(job.run.manifest, _manifest(job))
    write_text(job.files.command, shlex.join(sys.orig_argv) + "\n")
    write_trial(job.trial, job.files)


def finish(job: Job, end: RankEnd) -> None:
    """Write how the trial ended; end: of the rank that failed first.

    `paceline run` writes the outcome itself. It gets the failure of a rank that wrote none.
    """
    if job.supervised:
        report(job, end)
        return
    outcome = Outcome(
        schema=SCHEMA,
        trial_id=job.trial.id,
        status=outcome_status(end.exit_code),
        exit_code=end.exit_code,
        launched_unix_s=launched_unix_s(),
        ended_unix_s=time.time(),
        launcher_exit_status=None,  # the launcher still runs
        failed_rank=None if end.error is None else end.rank,
        message=None if end.error is None else str(end.error),
        error=end.error,
    )
    write_json(job.files.outcome, outcome)


def report(job: Job, end: RankEnd) -> None:
    """Write the failure of a rank that could not write its own, unless one is reported already.

    A rank that only lost a peer is not the cause, and is not reported.
    """
    if end.error is None or end.secondary or job.files.reported.exists():
        return
    own = [s for s in read_statuses(job.files) if s.rank == end.rank and s.state == "failed"]
    if all(s.secondary for s in own):
        write_json(job.files.reported, end.error)


def report_own(job: Job, end: RankEnd) -> None:
    """Report as a process that is a rank, or was to become one, if it sees the trial's directory.

    If it waited too long for others, it does not know the cause, and its launcher may.
    """
    if job.files.trial.exists() and end.exit_code != ExitCode.TIMED_OUT:
        report(job, end)


def _next_repeat(run: RunFiles, configuration: str) -> int:
    prefix = f"{configuration}.r"
    repeats = [name.removeprefix(prefix) for name, _ in run.trials() if name.startswith(prefix)]
    return max((int(repeat) for repeat in repeats if repeat.isdigit()), default=-1) + 1


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
