"""Ranks that are tasks of a Spark barrier stage: who they are, and how a failed stage is read.

Without Spark itself: the job script hands over what it needs of a task.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, ExitCode, PacelineError
from paceline.host.machine import host_name
from paceline.host.processes import parent_of, process_started_unix_s
from paceline.job.rank import RankEnd, run_rank
from paceline.job.rendezvous import check_reachable, close_listener, listen_on
from paceline.launchers.spark.mpi.task import TaskPlace, run_mpi_task
from paceline.launchers.spark.mpi.wire import new_token
from paceline.records.statuses import error_text, exit_code_of, read_statuses
from paceline.training.context import RankContext, StoreAddress
from paceline.training.resources import set_thread_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.job.options import Job

# By which the driver finds a rank's error in the stack traces that Spark wraps it in.
_RANK_ERROR = re.compile(r"paceline rank (\d+) ended (\{.*?\})$", re.MULTILINE)
# Spark's own words when a task's Python worker is gone.
_LOST_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")


class BarrierTaskFailed(Exception):  # noqa: N818  (seen only inside Spark's own messages)
    """Carries how a rank ended through Spark to the driver."""


def run_barrier_rank(job: Job, rank: int, all_gather: Callable[[str], list[str]]) -> int:
    """Train as task `rank` of the stage; returns the rank.

    all_gather: of the barrier task. Called once, since every call takes Spark about a second.
    Raises BarrierTaskFailed for the driver, after the rank's status has been written.
    """
    address = listen_on(job.trial.interface)  # every task's, before anybody knows where rank 0 is
    mine = TaskPlace(
        host=host_name(),
        address=address.host,
        port=address.port,
        executor=parent_of(os.getppid()),  # above the daemon that forks Python workers
        token=new_token(),
    )
    in_mpi = job.trial.transport == "mpi"
    with nullcontext() if in_mpi else _importing_worker(job):
        places = [TaskPlace.from_json(text) for text in all_gather(mine.to_json())]
    try:
        context = _context(job, rank, places, address)
        if in_mpi:
            end = run_mpi_task(job, rank, places, address)
        else:
            if rank != 0:
                close_listener(address)
            watched = {p.executor for p in places if p.host == context.host}
            end = run_rank(job, context, sorted(pid for pid in watched if pid is not None))
    except PacelineError as error:
        end = RankEnd(rank=rank, exit_code=error.exit_code, error=error_text(error))
        raise task_failed(end) from error
    if end.error is not None:
        raise task_failed(end)
    return rank


def _context(
    job: Job, rank: int, places: Sequence[TaskPlace], address: StoreAddress
) -> RankContext:
    """This task's place as a rank. Raises EnvironmentLacks if Spark's placement cannot be used."""
    hosts = [place.host for place in places]
    check_reachable(job.trial.interface, hosts)
    first = StoreAddress(host=places[0].address, port=places[0].port)
    context = barrier_context(rank, hosts, address if rank == 0 else first)
    _check_placement(job, hosts)
    return context


@contextmanager
def _importing_worker(job: Job) -> Iterator[None]:
    """Import the worker, and torch with it, beside the wait: that takes about as long.

    The number of threads is set before, since torch reads it at its import. Its cores are set
    later, as under every launcher before any of its threads has started.
    """
    set_thread_variables(job.trial.threads_per_worker)
    # If it fails, the training's own import fails again and is reported there.
    thread = threading.Thread(
        target=_import_quietly, args=("paceline.worker.worker",), name="imports", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        thread.join(job.trial.limits.rendezvous_s)


def _import_quietly(name: str) -> None:
    with contextlib.suppress(Exception):
        importlib.import_module(name)


def barrier_context(rank: int, hosts: Sequence[str], address: StoreAddress) -> RankContext:
    """The place of `rank`, given the host of every rank, in order.

    Raises EnvironmentLacks if hosts hold different numbers of ranks.
    """
    nodes = list(dict.fromkeys(hosts))
    counts = {node: hosts.count(node) for node in nodes}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{node}: {count}" for node, count in counts.items())
        raise EnvironmentLacks(
            f"expected as many ranks on every node, Spark placed {listed}; give executors "
            "spark.executor.cores = ranks per node x spark.task.cpus, one executor a node"
        )
    host = hosts[rank]
    return RankContext(
        rank=rank,
        world_size=len(hosts),
        local_rank=list(hosts[:rank]).count(host),
        ranks_on_node=counts[host],
        node_index=nodes.index(host),
        host=host,
        process_started_unix_s=process_started_unix_s(os.getpid()) or time.time(),
        store=address if len(hosts) > 1 else None,
    )


def _check_placement(job: Job, hosts: Sequence[str]) -> None:
    """Raise EnvironmentLacks if the ranks are on other numbers of nodes than the records say."""
    nodes, wanted = len(set(hosts)), job.trial.placement.nodes
    if nodes != wanted:
        raise EnvironmentLacks(
            f"expected the ranks on {wanted} node(s), Spark placed them on {nodes} "
            f"({', '.join(dict.fromkeys(hosts))}); say --ranks-per-node {len(hosts) // nodes} "
            "(in a spec: nodes and ranks_per_node), or give the executors other numbers of cores"
        )


def failed_stage(job: Job, message: str) -> RankEnd:
    """Which rank a failed stage is about, from Spark's message and the ranks' own statuses."""
    statuses = read_statuses(job.files)
    told = [s for s in statuses if s.state == "failed" and not s.secondary]
    if told:
        error = told[0].error or "no reason given"
        return RankEnd(rank=told[0].rank, exit_code=exit_code_of(error), error=error)
    found = _RANK_ERROR.search(message)
    if found:
        end = json.loads(found.group(2))
        if not end["secondary"]:
            return RankEnd(rank=int(found.group(1)), **end)
    lost = _LOST_TASK.search(message)
    # On a busy machine Spark may hear of a rank that misses its peer before it misses that peer.
    silent = [s.rank for s in statuses if s.state == "running"]
    rank = int(lost.group(1)) if lost else next(iter(silent), 0)
    crashed = lost is not None or bool(silent)
    what = _first_line(message)
    if crashed:
        # With MPI inside, ranks are processes of their own, which end with their task's.
        in_mpi = job.trial.transport == "mpi"
        whose = "the Python of its barrier task" if in_mpi else "its Python worker"
        what = f"{whose} was killed or crashed"
    return RankEnd(rank=rank, exit_code=ExitCode.RANK_FAILED, error=f"RankFailed: {what}")


def task_failed(end: RankEnd) -> BarrierTaskFailed:
    """How a rank's end is told to the driver: raise it out of the task."""
    content = {"exit_code": int(end.exit_code), "error": end.error, "secondary": end.secondary}
    return BarrierTaskFailed(f"paceline rank {end.rank} ended {json.dumps(content)}")


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
