"""The job side of launcher `spark`: train one trial as Spark stages, one task per rank.

Rank and peers come from the tasks; the worker is the same as under every launcher. Transport
`spark-rounds` uses rounds of ordinary tasks, every other transport one barrier stage.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import cast

from py4j.protocol import Py4JError
from pyspark import BarrierTaskContext, Broadcast, SparkContext, TaskContext

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.messages import say
from paceline.measure.records.documents import leave_attempt
from paceline.measure.records.rows import FailureRow
from paceline.runner.job.context import check_started_once
from paceline.runner.job.failure_words import rank_failed, starts_again
from paceline.runner.job.job import Job, parse_job
from paceline.runner.job.rank_status import RESTARTED_CODES, RankEnd
from paceline.runner.job.run_directory import finish, prepare
from paceline.runner.launchers.spark.barrier import BarrierStage, failed_stage, run_barrier_rank
from paceline.runner.launchers.spark.mpi_agent import new_token
from paceline.runner.launchers.spark.rounds.driver import RoundFailed, run_rounds
from paceline.runner.launchers.spark.rounds.round_task import run_round_task
from paceline.runner.launchers.spark.session import (
    Session,
    count_slots,
    executors_of,
    explain_loss,
    open_session,
)
from paceline.runner.launchers.supervise import wait_for_ranks
from paceline.train.rank.round_exchange import Orders, Report, State, together

_POLL_S = 0.2
_TOO_FEW_SLOTS = "SPARK-24819"  # Spark's name for the error of its own check
# Ranks of a failed stage end within a few seconds: those that lost a peer report it 2 s later.
_RANKS_END_S = 6.0


def main(archive: Path) -> int:
    """Train as the driver; return the exit code.

    archive: the package as a file for executors that have not installed it; it may be missing.
    """
    job = parse_job("spark", "spark-jobs/train.py")
    check_started_once()
    with open_session(job.trial) as session:
        _check_slots(session, job, session.asked_s)
        prepare(job)
        if archive.is_file():
            session.context.addPyFile(str(archive))
        in_rounds = job.trial.transport == "spark-rounds"
        end = _train_in_rounds(session, job) if in_rounds else _train(session, job)
        finish(job, end)
        session.failed = end.error is not None
        if end.error is not None:  # the end of the session may take longer than a supervisor waits
            say(rank_failed(end.error, job.trial.placement.ranks))
    return end.exit_code


def _check_slots(session: Session, job: Job, since_s: float) -> None:
    """Raise EnvironmentLacks if the stage could never start; Spark would wait ten minutes.

    A cluster may be starting executors for this job, for which it has `limits.slots_s`.
    since_s: time.monotonic() when it was asked for them.
    """
    context = session.context
    needed = job.trial.placement.ranks
    limit_s = job.trial.limits.slots_s
    deadline_s = since_s + limit_s
    while (found := count_slots(context)) is None or found < needed:
        if found is None:
            say("this Spark does not tell its slots; it checks them itself before the stage")
            return
        if time.monotonic() > deadline_s or session.is_local:
            raise EnvironmentLacks(
                f"Spark master {context.master} has {found} slot(s) of "
                f"{context.getConf().get('spark.task.cpus', '1')} cpu(s), the barrier stage needs "
                f"{needed} at once; use fewer ranks, or more or bigger executors (local[N], "
                "--num-executors, --executor-cores, --total-executor-cores). In a busy queue, let "
                f"it wait longer than {limit_s:g} s (limits.slots_s)"
            )
        time.sleep(_POLL_S)


def _train(session: Session, job: Job) -> RankEnd:
    """Train in a barrier stage; after a failure in another one, as `restarts` allows.

    Spark itself does not retry a stage that ends in collect() (apache/spark#22158).
    """
    for restarts_left in reversed(range(1 + job.trial.restarts)):
        end = _train_once(session.context, job)
        if end.error is None or end.exit_code not in RESTARTED_CODES or restarts_left == 0:
            break
        detected_unix_s = time.time()
        say(starts_again(end.error, restarts_left))
        wait_for_ranks(job.files, _RANKS_END_S)
        failure = FailureRow(
            detected_unix_s=detected_unix_s,
            ended_unix_s=time.time(),
            failed_rank=end.rank,
            message=str(end.error),
        )
        leave_attempt(job.files, failure)
        # Spark may be replacing an executor, on a host that has to start first.
        _check_slots(session, job, time.monotonic())
    return end


def _train_once(context: SparkContext, job: Job) -> RankEnd:
    ranks = job.trial.placement.ranks
    stage = context.parallelize(range(ranks), ranks).barrier().mapPartitions(_task(job))
    try:
        done = stage.collect()
    except Py4JError as error:
        if _TOO_FEW_SLOTS in str(error):  # only where _check_slots could not count them
            return RankEnd.of(
                EnvironmentLacks(
                    f"expected {ranks} slots at once for the barrier stage, Spark has fewer "
                    f"({_TOO_FEW_SLOTS}); use fewer ranks, or more or bigger executors"
                )
            )
        return failed_stage(job, str(error), partial(explain_loss, context))
    assert sorted(done) == list(range(ranks)), done
    return RankEnd(rank=0)


def _task(job: Job) -> Callable[[Iterable[int]], Iterable[int]]:
    token = new_token()

    def run(_partition: Iterable[int]) -> Iterable[int]:
        task = BarrierTaskContext.get()
        executors = {info.address for info in task.getTaskInfos()}
        stage = BarrierStage(
            all_gather=task.allGather, in_one_executor=len(executors) == 1, token=token
        )
        yield run_barrier_rank(job, task.partitionId(), stage)

    return run


def _train_in_rounds(session: Session, job: Job) -> RankEnd:
    """Train in rounds of ordinary tasks (transport spark-rounds)."""
    context = session.context
    ranks = job.trial.placement.ranks
    is_encrypted = (context.getConf().get("spark.io.encryption.enabled") or "").lower() == "true"

    def run_round(orders: Orders, state: State | None) -> Report:
        sent = context.broadcast(cast(State, _InOnePiece(state)) if is_encrypted else state)
        tasks = context.parallelize(range(ranks), ranks)
        reached = False
        try:
            report = tasks.mapPartitions(_round_task(job, orders, sent)).treeReduce(together)
            reached = True
        except Py4JError as error:
            raise RoundFailed(str(error)) from error
        finally:
            with contextlib.suppress(Py4JError):  # a context that has failed cannot do it
                sent.destroy(blocking=reached)  # blocking would wait for a lost executor
        return report

    executors_alive = None if session.is_local else executors_of(context)
    return run_rounds(job, run_round, session.cancel, executors_alive)


class _InOnePiece:
    """A value that arrives as itself and is sent without buffers beside the pickle, as NumPy's
    arrays have them: PySpark cannot encrypt those."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return pickle.loads, (pickle.dumps(self._value, protocol=4),)


def _round_task(
    job: Job, orders: Orders, sent: Broadcast[State | None]
) -> Callable[[Iterable[int]], Iterable[Report]]:
    def run(_partition: Iterable[int]) -> Iterable[Report]:
        task = TaskContext.get()
        assert task is not None
        yield run_round_task(job, task.partitionId(), orders, lambda: sent.value)

    return run
