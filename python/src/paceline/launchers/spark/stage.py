"""The job side of launcher `spark`: train one trial as Spark stages, one task per rank.

Rank and peers come from the tasks; the worker is the same as under every launcher. Settings of
spark-submit or spark-defaults.conf are kept; only missing ones are set here. Transport
`spark-rounds` uses rounds of ordinary tasks, every other transport one barrier stage.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import BarrierTaskContext, Broadcast, SparkConf, SparkContext, TaskContext

from paceline.errors import EnvironmentLacks
from paceline.job.context import check_started_once
from paceline.job.first_failure import RESTARTED_CODES
from paceline.job.job import Job, parse_job
from paceline.job.messages import rank_failed_line, say
from paceline.job.rank_status import RankEnd
from paceline.job.run_directory import finish, prepare
from paceline.launchers.descriptors import is_local
from paceline.launchers.spark.barrier import Stage, failed_stage, run_barrier_rank
from paceline.launchers.spark.configuration import check_conf, job_defaults
from paceline.launchers.spark.mpi.agent import new_token
from paceline.launchers.spark.rounds.driver import RoundFailed, run_rounds
from paceline.launchers.spark.rounds.round_task import run_round_task
from paceline.launchers.supervise import wait_for_ranks
from paceline.rank.rounds.exchange import Orders, Report, State, together
from paceline.records.attempts import leave_attempt
from paceline.records.rows import FailureRow

_POLL_S = 0.2
# Ranks of a failed stage end within a few seconds: those that lost a peer report it 2 s later.
_RANKS_END_S = 6.0


def main(archive: Path) -> int:
    """Train as the driver; return the exit code.

    archive: the package as a file for executors that have not installed it; it may be missing.
    """
    job = parse_job("spark", "spark-jobs/train.py")
    check_started_once()
    # Only a conf made beside a JVM has the settings of spark-submit; any other overrides them.
    SparkContext._ensure_initialized()  # noqa: SLF001
    conf = SparkConf()
    local = is_local(conf.get("spark.master") or "")
    check_conf(dict(conf.getAll()))
    for name, value in job_defaults(job.trial, local=local).items():
        conf.setIfMissing(name, value)
    context = SparkContext(conf=conf)
    try:
        _check_slots(context, job)
        prepare(job)
        if archive.is_file():
            context.addPyFile(str(archive))
        in_rounds = job.trial.transport == "spark-rounds"
        end = _train_in_rounds(context, job) if in_rounds else _train(context, job)
        finish(job, end)
    except BaseException:
        context.stop()
        raise
    if end.error is None and local:
        _end_jvm()
    else:
        context.stop()
    if end.error is not None:
        say(rank_failed_line(end.rank, job.trial.placement.ranks, end.error))
    return end.exit_code


def _check_slots(context: SparkContext, job: Job) -> None:
    """Raise EnvironmentLacks if the stage could never start; Spark would wait ten minutes.

    A cluster may be starting executors for this job, for which it has `limits.slots_s`.
    """
    spark = context._jsc.sc()  # noqa: SLF001  (Spark's own check uses it; there is no public way)
    profile = spark.resourceProfileManager().defaultResourceProfile()
    needed = job.trial.placement.ranks
    limit_s = job.trial.limits.slots_s
    deadline_s = time.monotonic() + limit_s
    while (found := int(spark.maxNumConcurrentTasks(profile))) < needed:
        if time.monotonic() > deadline_s or is_local(str(context.master)):
            raise EnvironmentLacks(
                f"Spark master {context.master} has {found} slot(s) of "
                f"{context.getConf().get('spark.task.cpus', '1')} cpu(s), the barrier stage needs "
                f"{needed} at once; use fewer ranks, or more or bigger executors (local[N], "
                "--num-executors, --executor-cores, --total-executor-cores). In a busy queue, let "
                f"it wait longer than {limit_s:g} s (limits.slots_s)"
            )
        time.sleep(_POLL_S)


def _train(context: SparkContext, job: Job) -> RankEnd:
    """Train in a barrier stage; after a failure in another one, as `restarts` allows.

    Spark itself does not retry a stage that ends in collect() (apache/spark#22158).
    """
    for restarts_left in reversed(range(1 + job.trial.restarts)):
        end = _train_once(context, job)
        if end.error is None or end.exit_code not in RESTARTED_CODES or restarts_left == 0:
            break
        detected_unix_s = time.time()
        say(f"{end.error}; starting the ranks again, {restarts_left} restarts left")
        wait_for_ranks(job.files, _RANKS_END_S)
        failure = FailureRow(
            detected_unix_s=detected_unix_s,
            ended_unix_s=time.time(),
            failed_rank=end.rank,
            message=end.error,
        )
        leave_attempt(job.files, failure)
        # Spark may be replacing an executor, on a host that has to start first.
        _check_slots(context, job)
    return end


def _train_once(context: SparkContext, job: Job) -> RankEnd:
    ranks = job.trial.placement.ranks
    stage = context.parallelize(range(ranks), ranks).barrier().mapPartitions(_task(job))
    try:
        done = stage.collect()
    except Py4JError as error:
        return failed_stage(job, str(error))
    assert sorted(done) == list(range(ranks)), done
    return RankEnd(rank=0)


def _task(job: Job) -> Callable[[Iterable[int]], Iterable[int]]:
    token = new_token()

    def run(_partition: Iterable[int]) -> Iterable[int]:
        task = BarrierTaskContext.get()
        executors = {info.address for info in task.getTaskInfos()}
        stage = Stage(all_gather=task.allGather, in_one_executor=len(executors) == 1, token=token)
        yield run_barrier_rank(job, task.partitionId(), stage)

    return run


def _train_in_rounds(context: SparkContext, job: Job) -> RankEnd:
    """Train in rounds of ordinary tasks (transport spark-rounds)."""
    ranks = job.trial.placement.ranks

    def run_round(orders: Orders, state: State | None) -> Report:
        sent = context.broadcast(state)
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

    def executors_alive() -> Collection[str]:
        names: str = context._jsc.sc().getExecutorIds().mkString(" ")  # noqa: SLF001  (no public way)
        return set(names.split())

    local = is_local(str(context.master))
    return run_rounds(job, run_round, context.cancelAllJobs, None if local else executors_alive)


def _round_task(
    job: Job, orders: Orders, sent: Broadcast[State | None]
) -> Callable[[Iterable[int]], Iterable[Report]]:
    def run(_partition: Iterable[int]) -> Iterable[Report]:
        task = TaskContext.get()
        assert task is not None
        yield run_round_task(job, task.partitionId(), orders, lambda: sent.value)

    return run


def _end_jvm() -> None:
    """End a local master's JVM, whose shutdown hook stops the context.

    A timer of barrier() is no daemon thread and would keep the JVM. `SparkContext.stop` would also
    wait up to 0.5 s for its server of accumulators, which polls.
    """
    sys.stdout.flush()
    jvm = SparkContext._jvm  # noqa: SLF001  (it outlives the context; there is no public way)
    assert jvm is not None
    with contextlib.suppress(Py4JError, OSError):  # the JVM ends before it can answer
        jvm.java.lang.System.exit(0)
