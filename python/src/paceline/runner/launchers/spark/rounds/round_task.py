"""One task of a round, in one of Spark's Python workers.

The module works without Spark: the job script passes what it needs of a task.
"""

from __future__ import annotations

import dataclasses
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.base.errors import PacelineError
from paceline.base.host.memory import permanent_objects
from paceline.base.host.processes import die_with_parent, process_started_unix_s
from paceline.collectives.host import host_name
from paceline.plan.trials.rank_context import RankContext
from paceline.runner.job.context import own_start_unix_s
from paceline.runner.job.job import Job
from paceline.runner.job.rank import prepare_process
from paceline.runner.job.rank_status import RankEnd, RankStatusFile, log_of, terminated
from paceline.runner.job.sidecars import host_sidecar
from paceline.runner.job.unshared import ONLY_GLOO, check_shared
from paceline.runner.launchers.spark.barrier import executor_pid, task_failed
from paceline.runner.launchers.spark.rounds.claims import Claims
from paceline.runner.launchers.spark.rounds.executors import own_executor

if TYPE_CHECKING:
    from paceline.train.rank.rounds.exchange import Orders, Report, State
    from paceline.train.rank.rounds.train import RoundWorker


@dataclass
class _Kept:
    """The state that this process keeps between tasks."""

    worker: RoundWorker
    sidecar: ExitStack  # of this host, if this process has started it


# By the trial's folder. Spark reuses its Python workers for tasks of the same application.
_kept: dict[str, _Kept] = {}


def run_round_task(
    job: Job, partition: int, orders: Orders, state: Callable[[], State | None]
) -> Report:
    """Claim a rank and do its part of the round, or end the rank if the orders say so.

    state: the averaged state, None in the first round.
    Raises BarrierTaskFailed for the driver, after the rank's status has been written. A task that
    cannot claim a rank writes none.
    """
    began_unix_s = time.time()
    die_with_parent(os.getppid())
    host = host_name()
    kept = _kept.get(str(job.files.root))
    try:
        check_shared(job, host, f"tasks take their ranks there{ONLY_GLOO}")
        context = _claimed(job, partition, orders, host, None if kept is None else kept.worker.rank)
    except PacelineError as error:  # there is no rank yet whose status could be written
        raise task_failed(job, RankEnd.of(error, partition, host)) from error
    status = RankStatusFile(job, context)
    with log_of(job, context), terminated(status):
        try:
            report = _run(job, context, orders, state, status)
        except Exception as error:
            if not isinstance(error, PacelineError):
                traceback.print_exc()
            raise task_failed(job, status.failed(error)) from error
    rank_report = report.ranks[context.rank]
    times = (began_unix_s, time.time())
    report.ranks[context.rank] = dataclasses.replace(
        rank_report, task_unix_s=times, executor=own_executor()
    )
    Claims(job.files.claims, job.trial.placement).finish(orders.number, context.rank)
    return report


def _claimed(job: Job, partition: int, orders: Orders, host: str, own: int | None) -> RankContext:
    place = job.trial.placement
    claims = Claims(job.files.claims, place)
    node = claims.node_of(host)
    rank = claims.take(orders.number, partition, node, own)
    return RankContext(
        rank=rank,
        world_size=place.ranks,
        local_rank=rank % place.ranks_per_node,
        ranks_on_node=place.ranks_per_node,
        node_index=node,
        host=host,
        process_started_unix_s=own_start_unix_s(),
    )


def _run(
    job: Job,
    context: RankContext,
    orders: Orders,
    state: Callable[[], State | None],
    status: RankStatusFile,
) -> Report:
    status.write("running")
    kept = _kept.get(str(job.files.root))
    if kept is None:
        status.log("starts" if orders.number == 0 else f"continues here with round {orders.number}")
        kept = _open(job, context, orders)
    if orders.finish:
        report = kept.worker.finish(context.rank, orders, state)
        kept.sidecar.close()
        status.write("done", started_unix_s=orders.carries[context.rank].process_started_unix_s)
        status.log("is done")
        return report
    report = kept.worker.run(context.rank, orders, state)
    # Spark may end this process before the rank's next task; its executor stands for the rank.
    executor = executor_pid()
    if executor is not None:
        status.write("running", pid=executor, started_unix_s=process_started_unix_s(executor))
    return report


def _open(job: Job, context: RankContext, orders: Orders) -> _Kept:
    prepare_process(job, context)
    with permanent_objects():
        from paceline.train.rank.rounds.train import RoundWorker  # noqa: PLC0415  (torch)

    executor = executor_pid()
    sidecar = ExitStack()
    sidecar.enter_context(host_sidecar(job, context, () if executor is None else (executor,)))
    worker = RoundWorker(job.trial, context, job.files)
    if orders.number == 0:
        worker.begin()
    else:
        worker.resume()
    kept = _kept[str(job.files.root)] = _Kept(worker, sidecar)
    return kept
