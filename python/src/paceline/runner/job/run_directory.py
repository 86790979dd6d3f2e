"""The records that `paceline run` keeps, kept by a job that was started without it.

So `paceline compare RUN_DIR` and `paceline report RUN_DIR` read both alike. One process of the job
calls `prepare` before any rank starts, and `finish` after the end.
"""

from __future__ import annotations

import dataclasses
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import EnvironmentLacks, ExitCode, TimedOut, UsageError
from paceline.base.host.machine import machine_facts, package_versions
from paceline.base.host.messages import say
from paceline.base.host.own_runs import remember_run
from paceline.base.host.programs import own_module
from paceline.collectives.host import Process, wait_until
from paceline.measure.records.documents import read_statuses, set_aside, write_trial
from paceline.measure.records.files import read_json, write_json, write_text
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import SCHEMA, Outcome
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import Order, launched_unix_s
from paceline.runner.job.job import Job, forget_address
from paceline.runner.job.rank_status import RankEnd, outcome_status
from paceline.train.data.remote_folder import remote_folder


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
        remember_run(job.run.root)
    write_text(job.files.command, shlex.join(sys.orig_argv) + "\n")
    write_trial(job.trial, job.files)


def finish(job: Job, end: RankEnd) -> None:
    """Write how the trial ended; end: of the rank that failed first.

    `paceline run` writes the outcome itself. It gets the failure of a rank that wrote none.
    """
    forget_address(job.files)
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
        "data": {training.entry_name: training.dataset},
        "versions": package_versions(),
        "host": machine_facts(),
    }


# --- a node that does not see the run directory: its ranks write to a folder of this node --------
#
# What they need comes from the run's remote place. A process of its own (`delivery`) sends what
# they wrote there when they have ended, however they end. So ranks and sidecar write as everywhere.

# The supervisor ends a launcher that still runs a minute after the last step.
_DELIVERY_S = 45.0
# Delegation tokens, which stand for a Kerberos ticket in a container: `hadoop fs` reads the file.
_TOKEN_FILE_VARIABLE = "HADOOP_TOKEN_FILE_LOCATION"  # noqa: S105  (a name)
_SHARED = "the run directory must be on storage that all nodes share, under the same path"
_OR_REMOTE = (
    "; or write the run to a place that every node reaches, to which each node sends its records "
    "(paceline run --out hdfs://…, s3://… or gs://…)"
)
# The end of a reason of the other transports of Spark.
ONLY_GLOO = "; with transport gloo a remote place is enough (paceline run --out URL)"


def check_shared(job: Job, host: str, because: str | None = None) -> None:
    """Raise EnvironmentLacks if the trial's directory cannot be seen from this host.

    because: why a remote place does not help.
    """
    if not job.files.trial.exists():
        raise EnvironmentLacks(
            f"host {host}: expected {job.files.trial}, found none: {_SHARED}"
            + (_OR_REMOTE if because is None else f", because {because}")
        )


def needs_run_directory(trial: Trial) -> str | None:
    """Return why all nodes have to see the run directory, under each launcher; None if not."""
    if trial.checkpoint is not None:
        return "every rank has to find all files of a checkpoint; or leave out [checkpoint]"
    if trial.restarts:
        return "a rank that starts again continues its records; or leave out `restarts`"
    return None


def new_folder(job: Job, host: str, because: str | None = None) -> str | None:
    """Return the name of a new folder for the records of this node; None if it needs none.

    It is not made yet. because: why the trial needs the run directory itself, if it does. Raises
    EnvironmentLacks if the node does not see the trial's directory and cannot do without it.
    """
    because = because or needs_run_directory(job.trial)
    if job.place is None or because is not None:
        check_shared(job, host, because)
    if job.files.trial.exists():
        return None
    return str(Path(tempfile.gettempdir(), f"paceline-{secrets.token_hex(8)}"))


@dataclass(frozen=True, slots=True)
class Delivery:
    """The process that sends the records of this node, as its first rank sees it."""

    process: subprocess.Popen[bytes]
    order: Order

    def wait(self) -> None:
        """Wait until the records are sent, so that the end of the job does not prevent it.

        Call it after a good end, when no rank waits for this one. After a failure, ranks of this
        node may go on until this process has ended, and the records are sent after that.
        """
        try:
            status = self.process.wait(_DELIVERY_S)
        except subprocess.TimeoutExpired:
            return  # it goes on, and `paceline run` waits for it
        if status != 0:
            lines = self.order.log.read_text("utf-8", "replace").splitlines() or ["no message"]
            say(
                f"host {self.order.host}: its records cannot be sent and stay in "
                f"{self.order.folder}: {lines[-1]}"
            )


def in_folder(
    job: Job, folder: str | None, host: str, *, ranks: int, is_first: bool
) -> tuple[Job, Delivery | None]:
    """Return the job with its records in the folder of this node, which its first rank makes.

    folder: from `new_folder`, the same for all ranks of the node; None changes nothing. ranks: of
    this node. Raises EnvironmentLacks if the remote place cannot be used, TimedOut if the first
    rank does not make the folder.
    """
    if folder is None:
        return job, None
    assert job.place is not None, "else there is no folder"
    run = RunFiles(Path(folder, job.files.root.parents[1].name))
    own = dataclasses.replace(job, files=run.trial(job.trial.id))
    if not is_first:
        _wait_for(own, host)
        return own, None
    remote_folder(job.place.host(host)).make()
    _fill(own, Path(folder))
    say(f"host {host} does not see {job.files.root}: it sends its records to {job.place.url}")
    order = Order(
        place=job.place,
        host=host,
        folder=folder,
        trial_root=str(own.files.root),
        ranks=ranks,
        first_rank=Process.current(),
        limit_s=job.trial.limits.trial_s + job.trial.limits.rendezvous_s,
    )
    return own, Delivery(_started(order), order)


def _wait_for(job: Job, host: str) -> None:
    limit_s = job.trial.limits.trial_s
    if not wait_until(job.files.trial.exists, limit_s):
        raise TimedOut(
            f"host {host}: expected {job.files.trial} from the first rank of this host within "
            f"{limit_s:g} s (limits.trial_s), found none; look at the log of that rank"
        )


def _fill(job: Job, folder: Path) -> None:
    """Make the folder with what the ranks read: the trial, and the states that they replay."""
    assert job.place is not None
    folder.mkdir(mode=0o700)
    fetched = RunFiles(folder / "fetched")
    if job.trial.is_replayed:
        remote_folder(job.place.replay).fetch(fetched.replay)
    remote_folder(job.place.trial).fetch(fetched.trial(job.trial.id).root)
    fetched.root.rename(job.files.root.parents[1])  # the other ranks see all of it or nothing


def _started(order: Order) -> subprocess.Popen[bytes]:
    command, environment = own_module("paceline.runner.job.delivery")
    file = Path(order.folder, "delivery.json")
    write_json(file, order)
    if tokens := environment.get(_TOKEN_FILE_VARIABLE):  # YARN removes it with the container
        environment[_TOKEN_FILE_VARIABLE] = shutil.copy(tokens, order.folder)
    with order.log.open("wb") as log:
        return subprocess.Popen(
            [*command, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=order.folder,  # without the folder of a container no JVM would start
            start_new_session=True,  # launchers end the session or the group of a rank
            env=environment,
        )
