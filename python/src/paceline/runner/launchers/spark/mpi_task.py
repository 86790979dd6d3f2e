"""Barrier tasks whose ranks form one MPI job: Spark provides slots and data, MPI the messages.

A task's Python cannot become a rank itself, because only mpirun and its daemons start ranks, as
their children. Therefore task 0 runs mpirun, which starts the ranks of task 0's host. In place of
ssh, mpirun calls an agent of ours (`mpi_agent`), which passes the start of a daemon to the first
task of each other host. Daemon and ranks are children of that task and end with it. Every rank is
on the host of its own task. The other tasks hold their slots until task 0 ends, which alone reports
how the ranks ended.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from paceline.base.errors import EnvironmentLacks, RankFailed, TimedOut
from paceline.base.host.processes import end_processes, guarded, shell_status
from paceline.base.host.programs import PACKAGE
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.rows import RankStatus
from paceline.plan.trials.trial import StoreAddress, Trial
from paceline.runner.job import failure_words
from paceline.runner.job.context import rank_environment
from paceline.runner.job.job import Job
from paceline.runner.job.rank_status import RankEnd, first_failure, recorded_end, trial_timed_out
from paceline.runner.launchers.base import failed_rank, lost_host, ranks_without_peer, signal_of
from paceline.runner.launchers.descriptors import SparkOptions
from paceline.runner.launchers.diagnosis import SPECIFIC_ERRORS
from paceline.runner.launchers.mpi.implementations import (
    MPIRUN_VARIABLE,
    OpenMpi5,
    find_mpirun,
    on_this_node,
    root_environment,
    slots_of_this_node,
)
from paceline.runner.launchers.mpi.rank import EnclosingJob
from paceline.runner.launchers.spark.mpi_agent import (
    AGENT_VARIABLE,
    DAEMON,
    DaemonStart,
    Peer,
    accept,
    connect,
)
from paceline.runner.launchers.supervise import WaitLimits, Watched, wait_for_end

# The MPI programs that barrier tasks start: mpirun in task 0, PRRTE's daemons on other hosts
#
# Whatever a task starts ends with the task: the kernel sends SIGTERM when Spark kills the task's
# Python, and mpirun and its daemons then end their ranks.

# mpirun would read these as its own: they belong to the batch or MPI job that Spark runs in.
_OF_OTHER_JOBS = ("SLURM_", "PBS_", "LSB_", "OMPI_", "PMIX_", "PRTE_", "PMI_")
_CHOICES = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
_TERMINATION_S = 5.0
_OUTPUT_END_S = 4.0
_KEPT_LINES = 200
_QUOTED_LINES = 8
_OURS = "paceline: "


def mpirun_command(mpirun: Path, job: Job, nodes: Sequence[str], sequence: Path) -> list[str]:
    """Return the command that starts every rank on the host of its barrier task.

    nodes: the address of every rank's host, by rank. sequence: a file that lists them. With a
    single node neither is used, and mpirun starts no daemon.
    """
    trial = job.trial
    # The first Python on PATH is on every host the one of its executor.
    python = os.path.basename(sys.executable)  # noqa: PTH119
    argv = [str(mpirun), "-n", str(trial.placement.ranks), "--bind-to", "none"]
    if len(set(nodes)) == 1:
        argv += on_this_node(trial.placement)
    else:
        argv += _on_nodes(job, nodes, sequence, python)
    argv += OpenMpi5().interface_parameters(trial)
    argv += trial.options_as(SparkOptions).mpi_arguments
    argv += [python, "-m", "paceline.runner.launchers.mpi.rank", "--trial", str(job.files.trial)]
    return argv if job.run is None else [*argv, "--out", str(job.run.root)]


def _on_nodes(job: Job, nodes: Sequence[str], sequence: Path, python: str) -> list[str]:
    """Return the options that place one rank after the other on the node of its line."""
    place = job.trial.placement
    slots = slots_of_this_node(place)
    mapping = f"seq:file={sequence}"
    if place.oversubscribe:
        mapping += ":OVERSUBSCRIBE"
    return [
        "--host", ",".join(f"{node}:{slots}" for node in dict.fromkeys(nodes)),
        "--map-by", mapping,
        "--leave-session-attached",  # daemons stay children of the barrier tasks
        "--prtemca", "plm", "ssh",
        "--prtemca", "plm_ssh_agent", f"{python} -m paceline.runner.launchers.spark.mpi_agent",
        "--prtemca", "plm_ssh_no_tree_spawn", "1",  # only task 0 can reach the other tasks
    ]  # fmt: skip


def environment_of_ranks(
    trial: Trial, enclosing: EnclosingJob, own: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of mpirun, or of a daemon, and of the ranks that it starts here.

    This host's Python comes first on PATH. The package is the one of this task: it may be in an
    archive that Spark has shipped to another place on every host.
    """
    kept = {
        name: value
        for name, value in own.items()
        if name.startswith(_CHOICES) or not name.startswith(_OF_OTHER_JOBS)
    }
    package = str(PACKAGE.parent)
    return {
        **kept,
        **rank_environment(trial),
        **root_environment(),
        **enclosing.environment(),
        "PATH": _before(str(Path(sys.executable).parent), own.get("PATH", os.defpath)),
        "PYTHONPATH": _before(package, own.get("PYTHONPATH", "")),
    }


def daemon_command(
    start: DaemonStart, mpirun: Path, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command of PRRTE's daemon on this host, and its environment.

    mpirun: of this host; its path on task 0's host may differ. Raises EnvironmentLacks if no daemon
    is beside it.
    """
    daemon = mpirun.with_name(DAEMON)
    if not daemon.is_file():
        raise EnvironmentLacks(
            f"expected Open MPI's daemon {daemon} beside {mpirun}, found none; choose an "
            f"Open MPI 5 with its own PRRTE ([mpi] mpirun, {MPIRUN_VARIABLE})"
        )
    prefix = daemon.parent.parent
    settings = dict.fromkeys(start.variables, str(prefix))
    if "LD_LIBRARY_PATH" in settings:
        libraries = environment.get("LD_LIBRARY_PATH", "")
        settings["LD_LIBRARY_PATH"] = _before(str(prefix / "lib"), libraries)
    return [str(daemon), *start.arguments], {**environment, **settings}


def _before(path: str, others: str) -> str:
    return os.pathsep.join(part for part in (path, others) if part)


def start_in_task(
    argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    """Start a program that ends when the calling thread ends, however that happens."""
    return subprocess.Popen(
        guarded(argv, kill_after_s=_TERMINATION_S),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Spark's daemon signals its process group; this ends in order
    )


def end_in_task(process: subprocess.Popen[bytes]) -> int:
    """End a program in order, then by force; return its exit status."""
    return end_processes([process], _TERMINATION_S)[0]


def run_mpirun(job: Job, argv: Sequence[str], environment: Mapping[str, str]) -> RankEnd:
    """Run mpirun to its end; return the end of the rank that failed first.

    All ranks have to start within `limits.rendezvous_s` and to end within `limits.trial_s`.
    """
    limits = job.trial.limits
    process = start_in_task(argv, environment, subprocess.PIPE)
    try:
        output = _Output(process)
        watched = wait_for_end(
            [process],
            job.files,
            WaitLimits(
                trial_s=limits.trial_s,
                start_s=limits.rendezvous_s,
                ranks=job.trial.placement.ranks,
            ),
        )
    finally:
        status = end_in_task(process)
    return end_of_mpirun(job, status, output.lines(), watched)


class _Output:
    """Forwards the output of mpirun to standard error and keeps its last lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._read, name="mpirun-output", daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """Return the last lines. Call it when the process has ended."""
        self._thread.join(_OUTPUT_END_S)
        return list(self._kept)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                text = line.decode(errors="replace")
                self._kept.append(text.rstrip())
                sys.stderr.write(text)
                sys.stderr.flush()


def end_of_mpirun(job: Job, exit_status: int, output: Sequence[str], watched: Watched) -> RankEnd:
    """Return the end that stands for all ranks, from their records, else from mpirun's words."""
    limits, statuses = job.trial.limits, read_statuses(job.files)
    done = {s.rank for s in statuses if s.state == "done"}
    open_ranks = [rank for rank in range(job.trial.placement.ranks) if rank not in done]
    if watched.timed_out:
        return RankEnd.of(trial_timed_out(job.trial), next(iter(open_ranks), 0))
    if watched.missing_ranks:
        late = failure_words.ranks_not_started(watched.missing_ranks, limits.rendezvous_s)
        return RankEnd.of(TimedOut(late), watched.missing_ranks[0])
    if exit_status == 0 and not open_ranks:
        return RankEnd(rank=0)
    recorded = recorded_end(job.files, statuses)
    if recorded is not None:
        return recorded
    return _end_in_output(exit_status, output, watched, statuses)


def _end_in_output(
    exit_status: int, output: Sequence[str], watched: Watched, statuses: Sequence[RankStatus]
) -> RankEnd:
    """Return the end of which no rank wrote the cause, from mpirun's words."""
    text = "\n".join(output)
    failure = first_failure(
        statuses,
        named=failed_rank(text),
        dead=watched.dead_ranks,
        without_peer=ranks_without_peer(text),
    )
    if failure.error is None:
        end = _end_of_host(text, statuses) or _refusal(exit_status, output, failure.rank)
        if end is not None:
            return end
    if failure.status is not None:
        number = signal_of(failure.status.rank, failure.status, text)
        return failure.end(failure_words.killed_under_mpirun(failure.status, exit_status, number))
    last = [line for line in output if line.strip()][-_QUOTED_LINES:]
    return failure.end(failure_words.mpirun_ended(exit_status, last))


def _end_of_host(output: str, statuses: Sequence[RankStatus]) -> RankEnd | None:
    """Return the end of a trial whose daemon on some host was lost; None if mpirun lost none."""
    lost = lost_host(output, statuses)
    if lost is None:
        return None
    error = RankFailed(failure_words.mpi_host_lost(lost.name, lost.ranks))
    return RankEnd.of(error, next(iter(lost.ranks), 0), lost.name)


def _refusal(exit_status: int, output: Sequence[str], rank: int | None) -> RankEnd | None:
    """Return the error with which the ranks ended before they could write a status."""
    ours = [line.removeprefix(_OURS) for line in output if line.startswith(_OURS)]
    if exit_status not in SPECIFIC_ERRORS or not ours:
        return None
    return RankEnd.of(SPECIFIC_ERRORS[exit_status](ours[-1]), rank or 0)


_POLL_S = 0.1
_OUTPUT_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlace:
    """The facts that a barrier task sends to all other tasks."""

    host: str
    address: str  # of a socket that it listens on
    port: int
    secret: str  # of its store, if it is task 0
    executor: int | None  # process id of the JVM above it
    folder: str | None = None  # that it would make for its node; see job.unshared

    @classmethod
    def from_json(cls, text: str) -> TaskPlace:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def run_mpi_task(
    job: Job, rank: int, places: Sequence[TaskPlace], address: StoreAddress, token: str
) -> RankEnd:
    """Serve as task `rank` until all ranks have ended; only task 0's end reports about them.

    places: of all tasks, by rank. address: the socket that this task listens on, closed here.
    token: the secret of this stage's tasks.
    Raises EnvironmentLacks if mpirun is missing or a host cannot be reached, TimedOut if task 0
    does not end.
    """
    assert address.listen_fd is not None
    with socket.socket(fileno=address.listen_fd) as listener:
        mine = places[rank]
        here = [number for number, place in enumerate(places) if place.host == mine.host]
        executors = sorted({e for n in here if (e := places[n].executor) is not None})
        enclosing = EnclosingJob(job.trial.launcher, here, executors)
        environment = environment_of_ranks(job.trial, enclosing)
        if rank == 0:
            return _lead_all(job, places, listener, environment, token)
        limits = job.trial.limits
        first = places[0]
        hello = {"rank": rank}
        address_0 = (first.address, first.port)
        with connect(address_0, token, hello, limits.rendezvous_s) as task_0:
            if rank == here[0]:
                _start_daemon(job, listener, task_0, environment, token)
            if not task_0.has_ended(limits.trial_s + limits.rendezvous_s):
                raise TimedOut(f"task {rank}: task 0 did not end within limits.trial_s")
    return RankEnd(rank=rank)


def _lead_all(
    job: Job,
    places: Sequence[TaskPlace],
    listener: socket.socket,
    environment: dict[str, str],
    token: str,
) -> RankEnd:
    """Wait, as task 0, for the other tasks, then run mpirun."""
    with ExitStack() as others, tempfile.NamedTemporaryFile("w", prefix="paceline-") as sequence:
        _wait_for_tasks(job, places, listener, others, token)
        # mpirun knows a host by the address of its first task.
        leaders: dict[str, TaskPlace] = {}
        for place in places:
            leaders.setdefault(place.host, place)
        nodes = [leaders[place.host].address for place in places]
        sequence.write("".join(f"{node}\n" for node in nodes))
        sequence.flush()
        for_agent = {
            "leaders": {p.address: [p.address, p.port] for p in leaders.values()},
            "token": token,
            "limit_s": job.trial.limits.trial_s,
        }
        mpirun = find_mpirun(job.trial.option("mpirun")).path
        argv = mpirun_command(mpirun, job, nodes, Path(sequence.name))
        return run_mpirun(job, argv, {**environment, AGENT_VARIABLE: json.dumps(for_agent)})


def _wait_for_tasks(
    job: Job,
    places: Sequence[TaskPlace],
    listener: socket.socket,
    others: ExitStack,
    token: str,
) -> None:
    """Wait until every other task has connected; closing `others` ends the connections."""
    limit_s = job.trial.limits.rendezvous_s
    deadline = time.monotonic() + limit_s
    absent = set(range(1, len(places)))
    while absent:
        accepted = accept(listener, token, deadline - time.monotonic())
        if accepted is None:
            hosts = ", ".join(sorted({places[rank].host for rank in absent}))
            raise EnvironmentLacks(
                f"barrier task(s) {', '.join(map(str, sorted(absent)))} (on {hosts}) did not reach "
                f"task 0 at {places[0].address}:{places[0].port} within {limit_s:g} s; the hosts "
                "must reach one another over the interface of [network] interface"
            )
        others.enter_context(accepted[0])
        absent.discard(accepted[1].get("rank", 0))


def _start_daemon(
    job: Job,
    listener: socket.socket,
    task_0: Peer,
    environment: dict[str, str],
    token: str,
) -> None:
    """Start PRRTE's daemon when mpirun's agent asks; return when it or task 0 has ended."""
    while (accepted := accept(listener, token, _POLL_S)) is None:
        if task_0.has_ended(_POLL_S):
            return
    agent, message = accepted
    with agent, tempfile.TemporaryFile() as output:
        start = DaemonStart(tuple(message["arguments"]), tuple(message["variables"]))
        mpirun = find_mpirun(job.trial.option("mpirun")).path
        command, settings = daemon_command(start, mpirun, environment)
        process = start_in_task(command, settings, output)
        try:
            while process.poll() is None and not agent.has_ended(_POLL_S):
                if task_0.has_ended(_POLL_S):
                    break
        finally:
            status = end_in_task(process)
        output.seek(0)
        text = output.read().decode(errors="replace")[-_OUTPUT_CHARACTERS:]
        with suppress(OSError):  # an agent that has ended needs no answer
            agent.send({"status": shell_status(status), "output": text.strip()})
