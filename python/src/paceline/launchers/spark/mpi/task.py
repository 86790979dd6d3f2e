"""Barrier tasks whose ranks are one MPI job: Spark gives slots and data, MPI carries gradients.

A task's Python cannot become a rank itself: only mpirun and its daemons start ranks, as their
children. So task 0 runs mpirun, which starts the ranks of task 0's host, and in place of ssh calls
an agent of ours, which hands the start of a daemon to the first task of each other host. Daemon
and ranks are children of that task and end with it. Every rank is on the host of its own task.
The other tasks hold their slots until task 0 ends, which alone says how the ranks ended.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, ExitCode, TimedOut
from paceline.host.tools import find_mpirun
from paceline.job.rank import RankEnd, check_shared
from paceline.launchers.spark.mpi.agent import AGENT_VARIABLE, DaemonStart
from paceline.launchers.spark.mpi.processes import (
    daemon_command,
    end_process,
    environment_of_ranks,
    start_guarded,
)
from paceline.launchers.spark.mpi.run import mpirun_words, run_mpirun
from paceline.launchers.spark.mpi.wire import accept, greet, has_ended, send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.job.options import Job
    from paceline.training.context import StoreAddress

_POLL_S = 0.1
_OUTPUT_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlace:
    """What a barrier task tells the others of itself."""

    host: str
    address: str  # of a socket that it listens on
    port: int
    executor: int | None  # process id of the JVM above it
    token: str

    @classmethod
    def from_json(cls, text: str) -> TaskPlace:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def run_mpi_task(
    job: Job, rank: int, places: Sequence[TaskPlace], address: StoreAddress
) -> RankEnd:
    """Play the part of task `rank` until all ranks have ended; only task 0's end tells of them.

    places: of all tasks, by rank; address: the socket that this task listens on, closed here.
    Raises EnvironmentLacks if mpirun or the run directory is not there, or a host cannot be
    reached, TimedOut if task 0 does not end.
    """
    assert address.listen_fd is not None
    with socket.socket(fileno=address.listen_fd) as listener:
        mine = places[rank]
        check_shared(job, mine.host)
        here = [number for number, place in enumerate(places) if place.host == mine.host]
        executors = sorted({e for n in here if (e := places[n].executor) is not None})
        environment = environment_of_ranks(job.trial, here, executors)
        if rank == 0:
            return _lead_all(job, places, listener, environment)
        listener.listen()
        limits = job.trial.limits
        first = places[0]
        hello = {"rank": rank}
        with greet((first.address, first.port), first.token, hello, limits.rendezvous_s) as task_0:
            if rank == here[0]:
                _start_daemon(job, listener, task_0, environment, first.token)
            if not has_ended(task_0, limits.trial_s + limits.rendezvous_s):
                raise TimedOut(f"task {rank}: task 0 did not end within limits.trial_s")
    return RankEnd(rank=rank, exit_code=ExitCode.OK)


def _lead_all(
    job: Job, places: Sequence[TaskPlace], listener: socket.socket, environment: dict[str, str]
) -> RankEnd:
    """Task 0: wait for the other tasks, then run mpirun."""
    with ExitStack() as others, tempfile.NamedTemporaryFile("w", prefix="paceline-") as sequence:
        _wait_for_tasks(job, places, listener, others)
        # A host goes by the address of its first task.
        addresses: dict[str, TaskPlace] = {}
        for place in places:
            addresses.setdefault(place.host, place)
        nodes = [addresses[place.host].address for place in places]
        sequence.write("".join(f"{node}\n" for node in nodes))
        sequence.flush()
        told = {
            "leaders": {p.address: [p.address, p.port] for p in addresses.values()},
            "token": places[0].token,
            "limit_s": job.trial.limits.trial_s,
        }
        mpirun = find_mpirun(job.trial.mpi.mpirun).path
        words = mpirun_words(mpirun, job, nodes, Path(sequence.name))
        return run_mpirun(job, words, {**environment, AGENT_VARIABLE: json.dumps(told)})


def _wait_for_tasks(
    job: Job, places: Sequence[TaskPlace], listener: socket.socket, others: ExitStack
) -> None:
    """Until every other task has come; their connections end when `others` is closed."""
    limit_s = job.trial.limits.rendezvous_s
    deadline = time.monotonic() + limit_s
    absent = set(range(1, len(places)))
    while absent:
        came = accept(listener, places[0].token, deadline - time.monotonic())
        if came is None:
            hosts = ", ".join(sorted({places[rank].host for rank in absent}))
            raise EnvironmentLacks(
                f"barrier task(s) {', '.join(map(str, sorted(absent)))} (on {hosts}) did not reach "
                f"task 0 at {places[0].address}:{places[0].port} within {limit_s:g} s; the hosts "
                "must reach one another over the interface of [network] interface or --interface"
            )
        others.enter_context(came[0])
        absent.discard(came[1].get("rank", 0))


def _start_daemon(
    job: Job,
    listener: socket.socket,
    task_0: socket.socket,
    environment: dict[str, str],
    token: str,
) -> None:
    """Start PRRTE's daemon as mpirun's agent asks for it; return when it or task 0 has ended."""
    while (came := accept(listener, token, _POLL_S)) is None:
        if has_ended(task_0, _POLL_S):
            return
    agent, asked = came
    start = DaemonStart(asked["program"], tuple(asked["arguments"]), tuple(asked["variables"]))
    mpirun = find_mpirun(job.trial.mpi.mpirun).path
    command, settings = daemon_command(start, mpirun, environment)
    with agent, tempfile.TemporaryFile() as output:
        process = start_guarded(command, settings, output)
        try:
            while process.poll() is None and not has_ended(agent, _POLL_S):
                if has_ended(task_0, _POLL_S):
                    break
        finally:
            status = end_process(process)
        output.seek(0)
        text = output.read().decode(errors="replace")[-_OUTPUT_CHARACTERS:]
        with suppress(OSError):  # an agent that has gone wants no answer
            send(agent, {"status": status if status >= 0 else 128 - status, "output": text.strip()})
