"""Barrier tasks whose ranks form one MPI job: Spark provides slots and data, MPI the messages.

A task's Python cannot become a rank itself, because only mpirun and its daemons start ranks, as
their children. Therefore task 0 runs mpirun, which starts the ranks of task 0's host. In place of
ssh, mpirun calls an agent of ours (`agent`), which passes the start of a daemon to the first task
of each other host. Daemon and ranks are children of that task and end with it. Every rank is on
the host of its own task. The other tasks hold their slots until task 0 ends, which alone reports
how the ranks ended.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.base.errors import EnvironmentLacks, TimedOut
from paceline.base.host.processes import shell_status
from paceline.plan.trials.rank_context import StoreAddress
from paceline.runner.job.job import Job
from paceline.runner.job.rank_status import RankEnd
from paceline.runner.launchers.mpi.rank import EnclosingJob
from paceline.runner.launchers.mpi.tools import find_mpirun
from paceline.runner.launchers.spark.mpi.agent import (
    AGENT_VARIABLE,
    DaemonStart,
    Peer,
    accept,
    connect,
)
from paceline.runner.launchers.spark.mpi.mpirun import (
    daemon_command,
    end_in_task,
    environment_of_ranks,
    mpirun_command,
    run_mpirun,
    start_in_task,
)

_POLL_S = 0.1
_OUTPUT_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlace:
    """The facts that a barrier task sends to all other tasks."""

    host: str
    address: str  # of a socket that it listens on
    port: int
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
