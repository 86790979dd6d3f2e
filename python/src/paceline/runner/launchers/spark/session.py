"""The SparkContext of a trial: one that exists already, or one of its own.

A notebook, a shell and managed Spark bring a context, and a process has no second one. It is used
unchanged. All calls into the JVM that are not public stand here. Managed clusters may deny them, so
each has a substitute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql.utils import is_remote

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.messages import kerberos_advice, say
from paceline.collectives.host import wait_until
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import launched_unix_s, rank_environment
from paceline.runner.job.failure_words import executor_lost_for
from paceline.runner.launchers.descriptors import is_local
from paceline.runner.launchers.spark.barrier import first_line
from paceline.runner.launchers.spark.configuration import check_conf, job_defaults, lacking_settings
from paceline.runner.launchers.spark.mpi_agent import new_token

# A new value gives the tasks Python workers that no other job uses.
_JOB_VARIABLE = "PACELINE_SPARK_JOB"
_DENIED = (Py4JError, AttributeError)
_POLL_S = 0.2
_LEAVE_S = 10.0  # for YARN to take an application out of its queue
_LOSS_S = 2.0  # `paceline run` ends a driver 10 s after the first failure of a rank


@dataclass(slots=True)
class Session:
    """The use of a SparkContext by one trial."""

    context: SparkContext
    cancel: Callable[[], object]  # ends the jobs of the trial, from any thread
    asked_s: float  # time.monotonic() when the executors were asked for
    failed: bool = False  # the user of the session sets it

    @property
    def is_local(self) -> bool:
        return is_local(str(self.context.master))


@contextmanager
def open_session(trial: Trial) -> Iterator[Session]:
    """Yield the session of a trial, in the existing context if there is one.

    Raises EnvironmentLacks if the configuration cannot run a barrier stage.
    """
    if is_remote() or "SPARK_REMOTE" in os.environ:
        raise EnvironmentLacks(
            "Spark Connect (also serverless and shared clusters of managed Spark) has no "
            "SparkContext, and ranks are tasks of one; use a cluster with classic access (for "
            'example "dedicated" on Databricks), or spark-submit without --remote'
        )
    existing = SparkContext._active_spark_context  # noqa: SLF001  (getOrCreate hides which it is)
    with _own(trial) if existing is None else _existing(existing, trial) as session:
        yield session


@contextmanager
def _own(trial: Trial) -> Iterator[Session]:
    """Make a context, and end it. Settings of spark-submit and spark-defaults.conf are kept."""
    # Only a conf made beside a JVM has the settings of spark-submit; any other overrides them.
    SparkContext._ensure_initialized()  # noqa: SLF001
    conf = SparkConf()
    for name, value in job_defaults(trial, local=is_local(conf.get("spark.master") or "")).items():
        conf.setIfMissing(name, value)
    check_conf(dict(conf.getAll()))
    asked_s = time.monotonic() - (time.time() - launched_unix_s())
    context = _new_context(conf, trial.limits.slots_s)
    session = Session(context, context.cancelAllJobs, asked_s)
    try:
        yield session
    except BaseException:
        context.stop()
        raise
    if session.failed or not session.is_local or not _end_jvm():
        context.stop()


def _new_context(conf: SparkConf, limit_s: float) -> SparkContext:
    """Start the application. Raises EnvironmentLacks if that is not possible."""
    master = conf.get("spark.master")
    try:
        with _start_limit(conf, limit_s):
            return SparkContext(conf=conf)
    except Py4JError as error:
        reason = first_line(str(error))
        advice = kerberos_advice(reason)
        why = reason if advice is None else f"{advice} ({reason})"
        raise EnvironmentLacks(
            f"Spark with master {master} could not start the application: {why}"
        ) from error


class _Late(BaseException):
    """Ends a call of Py4J, which catches every Exception."""


@contextmanager
def _start_limit(conf: SparkConf, limit_s: float) -> Iterator[None]:
    """Raise EnvironmentLacks if YARN does not start the application in time.

    Spark itself waits without a limit for a queue that has no room. Other masters give up.
    """
    if conf.get("spark.master") != "yarn":
        yield
        return

    def late(*_: object) -> None:
        raise _Late

    tag = f"paceline-{new_token()}".lower()  # as YARN keeps it
    conf.set("spark.yarn.tags", ",".join(filter(None, [conf.get("spark.yarn.tags"), tag])))
    # A second attempt would have no driver; YARN starts it when it has lost the first one.
    conf.setIfMissing("spark.yarn.maxAppAttempts", "1")
    # Asked later, the JVM would answer the call that was left.
    queue = conf.get("spark.yarn.queue", "default")
    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except _Late:
        # Calls of this thread wait in the JVM behind the one that was left.
        leaving = threading.Thread(target=_leave_queue, args=(tag,), daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)
        raise EnvironmentLacks(
            f"YARN has not started the application within {limit_s:g} s (limits.slots_s): the "
            f"queue {queue} has no room for it; wait longer, or choose another queue with "
            "spark.yarn.queue in [spark.conf]"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _leave_queue(tag: str) -> None:
    """Take the application with this tag out of the queue; it would start without a driver."""
    jvm = SparkContext._jvm  # noqa: SLF001  (there is no context)
    if jvm is None:
        return
    with contextlib.suppress(*_DENIED):
        yarn = jvm.org.apache.hadoop.yarn
        client = yarn.client.api.YarnClient.createYarnClient()
        client.init(yarn.conf.YarnConfiguration())
        client.start()
        accepted = jvm.java.util.EnumSet.of(yarn.api.records.YarnApplicationState.ACCEPTED)
        for found in client.getApplications(accepted):
            if found.getApplicationTags().contains(tag):
                client.killApplication(found.getApplicationId())


@contextmanager
def _existing(context: SparkContext, trial: Trial) -> Iterator[Session]:
    """Use a context that its owner needs afterwards: its settings and other jobs stay unchanged."""
    conf = dict(context.getConf().getAll())
    check_conf(conf)
    _name_lacking(context, lacking_settings(trial, conf))
    job, before = f"paceline-{new_token()}", dict(context.environment)
    context.addJobTag(job)
    # Workers keep cores and settings of a rank, so the owner's jobs must not get them.
    context.environment.update({**rank_environment(trial), _JOB_VARIABLE: job})
    session = Session(context, lambda: context.cancelJobsWithTag(job), time.monotonic())
    try:
        yield session
    except BaseException:
        session.cancel()
        raise
    finally:
        context.removeJobTag(job)
        context.environment.clear()
        context.environment.update(before)


def _name_lacking(context: SparkContext, lacking: dict[str, str]) -> None:
    text = f"uses the existing SparkContext ({context.applicationId}) as it is"
    if lacking:
        listed = ", ".join(f"{name}={value}" for name, value in lacking.items())
        text += f"; it lacks {listed}. Set them where the context is made, for the limits and the "
        text += "speed of a trial that spark-submit starts"
    say(text)


def count_slots(context: SparkContext) -> int | None:
    """Return how many tasks can run at once; None where Spark does not tell."""
    try:
        spark = context._jsc.sc()  # noqa: SLF001  (Spark's own check uses it)
        profile = spark.resourceProfileManager().defaultResourceProfile()
        return int(spark.maxNumConcurrentTasks(profile))
    except _DENIED:
        return None


def free_slots(master: str, wanted: int, limit_s: float) -> int | None:
    """Return how many tasks of one core a master can run now; None where Spark does not tell.

    Wait at most `limit_s` for executors with `wanted` slots.
    """
    conf = SparkConf().setMaster(master).setAppName("paceline doctor")
    conf.set("spark.ui.enabled", "false").set("spark.dynamicAllocation.enabled", "false")
    context = SparkContext(conf=conf)
    try:
        wait_until(lambda: (count_slots(context) or 0) >= wanted, limit_s, _POLL_S)
        return count_slots(context)
    finally:
        context.stop()


def executors_of(context: SparkContext) -> Callable[[], Collection[str]] | None:
    """Return a function that returns the names of the executors; None where Spark does not tell."""

    def alive() -> Collection[str]:
        names: str = context._jsc.sc().getExecutorIds().mkString(" ")  # noqa: SLF001
        return set(names.split())

    try:
        alive()
    except _DENIED:
        return None
    return alive


def explain_loss(context: SparkContext, reason: str | None) -> str:
    """Return why an executor was lost and where to look; empty if none is known to be lost.

    reason: Spark's own; None if a peer of its ranks has noticed the loss first. Spark explains it
    some seconds later, YARN misses a node after minutes.
    """
    reasons: list[str] = []

    def is_explained() -> bool:
        executors = context._jsc.sc().statusStore().executorList(False)  # noqa: SLF001
        removed = [executors.apply(i).removeReason() for i in range(executors.size())]
        reasons.extend(reason.get() for reason in removed if reason.isDefined())
        return bool(reasons)

    where = ""
    with contextlib.suppress(*_DENIED):
        if reason is None and not is_local(str(context.master)):
            reason = reasons[0] if wait_until(is_explained, _LOSS_S, _POLL_S) else None
        if context.master == "yarn":
            logs = f"yarn logs -applicationId {context.applicationId}"
            where = f"look at the nodes (yarn node -list -all) and at the logs ({logs})"
    return "; ".join(filter(None, [executor_lost_for(reason), where]))


def _end_jvm() -> bool:
    """End a local master's JVM, whose shutdown hook stops the context; False where it cannot.

    A timer of barrier() is no daemon thread and would keep the JVM. `SparkContext.stop` would also
    wait up to 0.5 s for its server of accumulators, which polls.
    """
    sys.stdout.flush()
    jvm = SparkContext._jvm  # noqa: SLF001  (it outlives the context)
    if jvm is None:
        return False
    with contextlib.suppress(Py4JError, OSError):  # the JVM ends before it can answer
        jvm.java.lang.System.exit(0)
    return True
