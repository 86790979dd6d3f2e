"""Train one trial as a Spark barrier stage, one task a rank.

    spark-submit --master local[2] spark-jobs/train.py --ranks 2 --workload tiny --data DATASET \
        --out RUN_DIR

Rank and peers come from the barrier tasks; all else is Paceline's worker, run inside Spark's
Python workers. What spark-submit or spark-defaults.conf set stands; only the rest is set here.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import paceline  # noqa: F401
except ImportError:  # from the archive: the package lies beside this script
    sys.path.insert(0, str(Path(__file__).resolve().with_name("paceline.zip")))

from py4j.protocol import Py4JError
from pyspark import BarrierTaskContext, SparkConf, SparkContext, TaskContext

from paceline.errors import EnvironmentLacks, ExitCode, UsageError
from paceline.job.byhand import finish, prepare
from paceline.job.messages import rank_failed_line, run_guarded, say
from paceline.job.options import Job, asked_ranks, job_of, parser
from paceline.job.rank import RankEnd
from paceline.launchers.spark.barrier import failed_stage, run_barrier_rank
from paceline.launchers.spark.launcher import cluster_shape, is_local
from paceline.launchers.spark.native import liveness_settings, native_settings
from paceline.launchers.spark.rounds.driver import RoundFailed, run_rounds
from paceline.launchers.spark.rounds.exchange import together
from paceline.launchers.spark.rounds.task import run_round_task
from paceline.transports.spark_allgather.messages import offer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from pyspark import Broadcast

    from paceline.launchers.spark.rounds.exchange import Orders, Report, State

_ARCHIVE = Path(__file__).resolve().with_name("paceline.zip")
# Executors register one by one, soon after the first.
_SLOTS_WAIT_S = 4.0
_POLL_S = 0.2


def main() -> int:
    options = parser("spark-jobs/train.py").parse_args()
    ranks = asked_ranks(options)
    if ranks is None:
        raise UsageError("--ranks: expected how many barrier tasks to train with")
    # Only a conf made beside a JVM knows what spark-submit was told; any other overrides it.
    SparkContext._ensure_initialized()  # noqa: SLF001
    conf = SparkConf()
    local = is_local(conf.get("spark.master") or "")
    on_node = options.ranks_per_node or ranks
    if ranks % on_node:
        raise UsageError(f"--ranks {ranks}: expected a multiple of --ranks-per-node {on_node}")
    if options.trial is None and options.ranks_per_node is None and not local:
        say("note: --ranks-per-node not given, all ranks are taken to be on one node")
    job = job_of(options, "spark", nodes=ranks // on_node, ranks_per_node=on_node)
    _complete(conf, job, local=local)
    context = SparkContext(conf=conf)
    try:
        _check_slots(context, job)
        prepare(job)
        if _ARCHIVE.is_file():
            context.addPyFile(str(_ARCHIVE))
        in_rounds = job.trial.transport == "spark-rounds"
        end = _train_in_rounds(context, job) if in_rounds else _train(context, job)
        finish(job, end)
    finally:
        context.stop()
    if end.error is not None:
        say(rank_failed_line(end.rank, ranks, end.error))
    elif local:
        _end_jvm()
    return end.exit_code


def _complete(conf: SparkConf, job: Job, *, local: bool) -> None:
    """Set what nobody has set. Raises EnvironmentLacks if dynamic allocation is on."""
    if (conf.get("spark.dynamicAllocation.enabled") or "false").lower() == "true":
        raise EnvironmentLacks(
            "spark.dynamicAllocation.enabled is true, but a barrier stage needs all its slots at "
            "once (SPARK-24942); submit with --conf spark.dynamicAllocation.enabled=false"
        )
    place, limits = job.trial.placement, job.trial.limits
    defaults = {
        "spark.app.name": job.trial.id,
        "spark.task.cpus": place.threads_per_rank,
        "spark.task.maxFailures": 1,
        "spark.python.worker.reuse": "false",
        "spark.barrier.sync.timeout": math.ceil(limits.rendezvous_s),
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": 3,
        **native_settings(job.trial),
    }
    if local:
        defaults |= {
            "spark.ui.enabled": "false",
            "spark.authenticate": "true",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
    else:
        defaults |= {**cluster_shape(job.trial), **liveness_settings(job.trial)}
    for name, value in defaults.items():
        conf.setIfMissing(name, str(value))


def _check_slots(context: SparkContext, job: Job) -> None:
    """Raise EnvironmentLacks if the stage could never start; Spark would wait ten minutes.

    A cluster that has no executor for us yet may be starting one, for which it has
    `limits.rendezvous_s`; from when the last one came, the others have _SLOTS_WAIT_S.
    """
    spark = context._jsc.sc()  # noqa: SLF001  (the number that Spark's own check uses, no public way)
    profile = spark.resourceProfileManager().defaultResourceProfile()
    wanted = job.trial.placement.ranks
    slots, deadline = 0, time.monotonic() + job.trial.limits.rendezvous_s
    while (found := int(spark.maxNumConcurrentTasks(profile))) < wanted:
        if found != slots:
            slots, deadline = found, time.monotonic() + _SLOTS_WAIT_S
        if time.monotonic() > deadline or is_local(str(context.master)):
            raise EnvironmentLacks(
                f"Spark master {context.master} has {found} slot(s) of "
                f"{context.getConf().get('spark.task.cpus', '1')} cpu(s), the barrier stage needs "
                f"{wanted} at once; use fewer ranks, or more or bigger executors (local[N], "
                "--num-executors, --executor-cores, --total-executor-cores)"
            )
        time.sleep(_POLL_S)


def _train(context: SparkContext, job: Job) -> RankEnd:
    ranks = job.trial.placement.ranks
    stage = context.parallelize(range(ranks), ranks).barrier().mapPartitions(_task(job))
    try:
        # A stage that ends in collect() is not retried by Spark (apache/spark#22158).
        done = stage.collect()
    except Py4JError as error:
        return failed_stage(job, str(error))
    assert sorted(done) == list(range(ranks)), done
    return RankEnd(rank=0, exit_code=ExitCode.OK)


def _task(job: Job) -> Callable[[Iterable[int]], Iterable[int]]:
    def run(_partition: Iterable[int]) -> Iterable[int]:
        task = BarrierTaskContext.get()
        offer(task.allGather)
        yield run_barrier_rank(job, task.partitionId(), task.allGather)

    return run


def _train_in_rounds(context: SparkContext, job: Job) -> RankEnd:
    """Ordinary tasks, round after round (transport spark-rounds)."""
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
            with contextlib.suppress(Py4JError):  # a context that has failed cannot
                sent.destroy(blocking=reached)  # a lost executor would be waited for
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
    """End a local master's JVM: a timer of barrier() is no daemon thread and would keep it."""
    sys.stdout.flush()
    jvm = SparkContext._jvm  # noqa: SLF001  (outlives the context; no public way)
    assert jvm is not None
    with contextlib.suppress(Py4JError, OSError):  # the JVM ends before it can answer
        jvm.java.lang.System.exit(0)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
