"""Ranks that are tasks of a Spark barrier stage, and the reason why such a stage failed.

The module works without Spark: the job script passes what it needs of a task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from paceline.base.errors import PacelineError, TimedOut
from paceline.base.host.processes import parent_of
from paceline.collectives.host import host_name
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.files import jsonable
from paceline.measure.records.rows import Failure
from paceline.plan.trials.trial import RankContext, StoreAddress, Trial
from paceline.runner.job import failure_words
from paceline.runner.job.context import nodes_of, rank_context
from paceline.runner.job.job import (
    Job,
    check_reachable,
    close_listener,
    exchange_address,
    listen_on,
)
from paceline.runner.job.rank import import_train, run_rank
from paceline.runner.job.rank_status import FirstFailure, RankEnd, first_failure, recorded_end
from paceline.runner.job.run_directory import ONLY_GLOO, in_folder, new_folder, report_own
from paceline.runner.launchers.spark.configuration import EXECUTORS_ADVICE, wrong_nodes
from paceline.runner.launchers.spark.launcher import LOST_TASK
from paceline.runner.launchers.spark.mpi_task import TaskPlace, run_mpi_task
from paceline.train.training.resources import set_thread_variables

# The driver finds the error of a rank whose node does not see the trial's directory by this line in
# the stack traces that Spark wraps around it.
_RANK_ERROR = re.compile(r"paceline rank \d+ ended (\{.*?\})$", re.MULTILINE)
# Spark's reason, for example that YARN ended a container (TaskEndReason.scala).
_LOST_EXECUTOR = re.compile(r"ExecutorLostFailure \(.+?\) Reason: (.+)")
_CALL = "An error occurred while calling "  # Py4J's first line; the next one has the reason
# Why the ranks of transport mpi need a run directory that all hosts see.
_NEEDS_FILES = f"task 0 reads there how all ranks ended{ONLY_GLOO}"


class BarrierTaskFailed(Exception):  # noqa: N818  (it appears only inside Spark's own messages)
    """Carries the end of a rank through Spark to the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierStage:
    """A barrier stage, as one of its tasks sees it."""

    all_gather: Callable[[str], list[str]]  # of the barrier task; a call takes about a second
    in_one_executor: bool  # all tasks
    token: str  # a secret by which the tasks recognise each other


def run_barrier_rank(job: Job, rank: int, stage: BarrierStage) -> int:
    """Train as task `rank` of the stage; return the rank.

    Raises BarrierTaskFailed for the driver, after the rank's status has been written.
    """
    over_mpi = job.trial.transport == "mpi"
    try:
        host = host_name()
        folder = new_folder(job, host, _NEEDS_FILES if over_mpi else None)
        # Every task listens, because the host of rank 0 is not known yet.
        address = listen_on(job.trial.interface)
        own = TaskPlace(
            host=host,
            address=address.host,
            port=address.port,
            secret=address.secret,
            executor=executor_pid(),
            folder=folder,
        )
        if stage.in_one_executor and folder is None:
            places = _on_this_host(job, rank, own, address, stage.token)
        else:
            with nullcontext() if over_mpi else _importing_worker(job):
                texts = _at_barrier(job, rank, own.to_json(), stage.all_gather)
            places = [TaskPlace.from_json(text) for text in texts]
        context = _context(job, rank, places, address)
        if over_mpi:
            end = run_mpi_task(job, rank, places, address, stage.token)
        else:
            if rank != 0:
                close_listener(address)
            end = _run(job, context, [place for place in places if place.host == host])
    except PacelineError as error:
        raise task_failed(job, RankEnd.of(error, rank, host_name())) from error
    if end.error is not None:
        raise task_failed(job, end)
    return rank


def _run(job: Job, context: RankContext, here: Sequence[TaskPlace]) -> RankEnd:
    """Run the rank. here: the tasks on this host, by rank."""
    is_first = context.local_rank == 0
    job, delivery = in_folder(job, here[0].folder, context.host, ranks=len(here), is_first=is_first)
    executors = {place.executor for place in here if place.executor is not None}
    end = run_rank(job, context, sorted(executors))
    if delivery is not None and end.error is None:
        delivery.wait()
    return end


def _on_this_host(
    job: Job, rank: int, own: TaskPlace, address: StoreAddress, token: str
) -> list[TaskPlace]:
    """Return the places of tasks that share an executor, without a call of Spark's allGather.

    The tasks need only rank 0's socket; the sockets of the others are not used on one host.
    """
    start = hashlib.sha256(token.encode()).hexdigest()
    first = exchange_address(job, rank, address, start)
    place = dataclasses.replace(own, address=first.host, port=first.port, secret=first.secret)
    return [place] * job.trial.placement.ranks


def _at_barrier(
    job: Job, rank: int, text: str, all_gather: Callable[[str], list[str]]
) -> list[str]:
    """Return the texts of all tasks. Raises TimedOut if one did not come to Spark's barrier."""
    began_s = time.monotonic()
    try:
        return all_gather(text)
    except EOFError as error:  # all that PySpark reports
        limit_s = job.trial.limits.rendezvous_s
        # Spark's limit counts from the first task at the barrier. Earlier, another task has failed.
        if time.monotonic() - began_s < limit_s / 2:
            raise
        raise TimedOut(
            failure_words.tasks_not_at_barrier(rank, job.trial.placement.ranks, limit_s)
        ) from error


def executor_pid() -> int | None:
    """Return the process id of the JVM above the daemon that forks Python workers."""
    return parent_of(os.getppid())


def _context(
    job: Job, rank: int, places: Sequence[TaskPlace], address: StoreAddress
) -> RankContext:
    """Return this task's context. Raises EnvironmentLacks if Spark's placement cannot be used."""
    hosts = [place.host for place in places]
    check_reachable(job.trial.interface, hosts)
    check_placement(job, hosts)
    first = StoreAddress(host=places[0].address, port=places[0].port, secret=places[0].secret)
    return rank_context(rank, hosts, address if rank == 0 else first)


def check_placement(job: Job, hosts: Sequence[str]) -> None:
    """Raise EnvironmentLacks if the ranks are on other numbers of nodes than planned."""
    nodes, expected = nodes_of(hosts, EXECUTORS_ADVICE), job.trial.placement.nodes
    if len(nodes) != expected:
        raise wrong_nodes(expected, nodes)


@contextmanager
def _importing_worker(job: Job) -> Iterator[None]:
    """Import the work of a rank, and torch with it, during the wait, which takes about as long.

    The number of threads is set first, because torch reads it at its import. The cores are set
    later, as under every launcher before any of its threads has started.
    """
    set_thread_variables(job.trial.placement.threads_per_worker)
    # If it fails, the training's own import fails again and is reported there.
    thread = threading.Thread(
        target=_import_quietly, args=(job.trial,), name="imports", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        thread.join(job.trial.limits.rendezvous_s)


def _import_quietly(trial: Trial) -> None:
    with contextlib.suppress(Exception):
        import_train(trial)


def failed_stage(
    job: Job,
    message: str,
    explain_loss: Callable[[str | None], str] = failure_words.executor_lost_for,
) -> RankEnd:
    """Return how the first rank of a failed stage ended.

    From the records of the ranks and of their tasks; else from Spark's message.
    explain_loss: returns why an executor was lost. It gets Spark's reason, if that is known.
    """
    statuses = read_statuses(job.files)
    recorded = recorded_end(job.files, statuses)
    if recorded is not None:
        return recorded
    lost = LOST_TASK.search(message)
    named = None if lost is None else int(lost.group(1))
    failure = first_failure(statuses, named=named)
    if failure.error is None:
        sent = _sent_end(message)
        if sent is not None:
            return sent
    if failure.rank is None and named is None:
        return failure.end(first_line(message))
    if failure.rank is None or failure.was_asked_to_end:
        failure = FirstFailure(rank=named if failure.rank is None else failure.rank)
    found = _LOST_EXECUTOR.search(message)
    loss = explain_loss(None if found is None else found[1].strip())
    over_mpi = job.trial.transport == "mpi"
    return failure.end(failure_words.task_killed(loss, over_mpi=over_mpi))


def _sent_end(message: str) -> RankEnd | None:
    """Return the error that a task sent through Spark; None if it only lost a peer."""
    found = _RANK_ERROR.search(message)
    if found is None:
        return None
    content = json.loads(found.group(1))
    failure = Failure(**content["error"])
    return None if content["secondary"] else RankEnd(rank=failure.rank, error=failure)


def task_failed(job: Job, end: RankEnd) -> BarrierTaskFailed:
    """Return the exception that ends a task; raise it out of the task.

    The failure is reported in the trial's directory if its rank could not write it. If this node
    does not see that directory, the driver finds the failure in the exception.
    """
    assert end.error is not None
    report_own(job, end)
    content = {"error": jsonable(end.error), "secondary": end.secondary}
    return BarrierTaskFailed(f"paceline rank {end.rank} ended {json.dumps(content)}")


def first_line(message: str) -> str:
    """Return the reason in an error of Py4J, without the call that failed and the stack."""
    lines = (line.removeprefix(": ").strip() for line in message.splitlines())
    return next((x for x in lines if x and not x.startswith(_CALL)), "no reason given")
