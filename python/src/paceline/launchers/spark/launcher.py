"""`spark`: spark-submit of `spark-jobs/train.py`, one barrier task per rank."""

from __future__ import annotations

import math
import os
import re
import sys
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.java import find_java
from paceline.host.tools import job_script
from paceline.job.checks import check_cores, check_dataset
from paceline.job.environment import rank_environment
from paceline.launchers.base import Command, first_named
from paceline.launchers.mpi.launcher import check_mpi
from paceline.launchers.mpi.tools import MPIRUN_VARIABLE
from paceline.launchers.spark.descriptor import SparkOptions
from paceline.launchers.spark.native import driver_memory, liveness_settings, native_settings
from paceline.launchers.spark.tools import find_spark

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles

# Spark's message for a task whose Python worker has died.
LOST_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")
_LOCAL = re.compile(r"local(\[[^\]]*\])?")
# The JVM only distributes tasks. Spark's start-up is mostly class loading and compiling; the first
# compiler alone needs half the CPU time for it (measured: 4.7 s -> 2.6 s of CPU).
_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"


class SparkLauncher:
    """Configures Spark so that with a local master nothing listens beyond this node, nothing is
    retried, and nothing waits for slots that never come. The spec's `spark.conf` overrides this."""

    name = "spark"

    def preflight(self, trial: Trial) -> None:
        find_java()
        find_spark()
        job_script("spark-jobs", "train.py")
        check_conf(trial.options_as(SparkOptions).conf)
        if trial.transport == "mpi" and _runs_on_this_python(trial):
            check_mpi(trial)
        if is_local(master_of(trial)):
            check_dataset(trial.training.dataset)
            check_cores(trial)
            _check_local_slots(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        spark = find_spark()
        argv = [str(spark.path / "bin" / "spark-submit"), "--master", master_of(trial)]
        argv += ["--driver-memory", driver_memory(trial)]
        for name, value in {**configuration(trial), **trial.options_as(SparkOptions).conf}.items():
            argv += ["--conf", f"{name}={value}"]
        script = job_script("spark-jobs", "train.py")
        argv += [str(script), "--trial", str(files.trial)]
        return Command(argv=tuple(argv), environment=_environment(trial))

    def failed_rank(self, log_text: str) -> int | None:
        return first_named((LOST_TASK,), log_text)


def _runs_on_this_python(trial: Trial) -> bool:
    """Return whether tasks use this Python, and with it the MPI that can be checked here."""
    conf = trial.options_as(SparkOptions).conf
    return is_local(master_of(trial)) or "spark.pyspark.python" not in conf


def master_of(trial: Trial) -> str:
    """Return the spec's master, else this node with as many slots as the trial needs."""
    slots = slots_per_node(trial) * trial.placement.nodes
    return trial.options_as(SparkOptions).master or f"local[{slots}]"


def slots_per_node(trial: Trial) -> int:
    """Return Spark's cores, one per thread: more than the node has where ranks share cores."""
    return trial.placement.ranks_per_node * trial.placement.threads_per_rank


def is_local(master: str) -> bool:
    """Return whether the master is the driver itself; `local-cluster[…]` starts processes."""
    return _LOCAL.fullmatch(master) is not None


def job_defaults(trial: Trial, *, local: bool) -> dict[str, str]:
    """Return the configuration that a trial needs; the job script sets it where it is missing."""
    conf = {
        "spark.app.name": trial.id,
        "spark.task.cpus": str(trial.placement.threads_per_rank),
        "spark.task.maxFailures": "1",
        "spark.python.worker.reuse": "false",
        # The default is a year.
        "spark.barrier.sync.timeout": str(math.ceil(trial.limits.rendezvous_s)),
        # The default waits 10 minutes for slots, 40 checks 15 s apart, with only a warning.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
        **native_settings(trial),
    }
    if not local:
        return {**conf, **_cluster_shape(trial), **liveness_settings(trial)}
    return {
        **conf,
        "spark.ui.enabled": "false",
        "spark.authenticate": "true",  # with a local master Spark creates the secret itself
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }


def configuration(trial: Trial) -> dict[str, str]:
    """Return the configuration for spark-submit, before that of the spec."""
    local = is_local(master_of(trial))
    conf = {
        "spark.dynamicAllocation.enabled": "false",
        "spark.stage.maxConsecutiveAttempts": "1",
        "spark.speculation": "false",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        "spark.driver.extraJavaOptions": _QUICK_JVM,
        "spark.executor.extraJavaOptions": _QUICK_JVM,
        **job_defaults(trial, local=local),
    }
    if not local:
        own = {k: v for k, v in os.environ.items() if k == MPIRUN_VARIABLE}
        ranks = {**rank_environment(trial), **own}
        conf |= {f"spark.executorEnv.{k}": v for k, v in ranks.items()}
    return conf


def _cluster_shape(trial: Trial) -> dict[str, str]:
    """Return the cores to use on a cluster: one executor per node if there are several."""
    place = trial.placement
    shape = {
        "spark.cores.max": str(slots_per_node(trial) * place.nodes),
        # The session is ready when all executors are, not only the first; it waits 30 s for them.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    }
    if place.nodes > 1:
        shape["spark.executor.cores"] = str(slots_per_node(trial))
        shape["spark.executor.instances"] = str(place.nodes)  # YARN and Kubernetes
    return shape


def _environment(trial: Trial) -> dict[str, str]:
    java_home = find_java().path.resolve().parent.parent
    spark = find_spark()
    environment = {
        **rank_environment(trial),
        "JAVA_HOME": str(java_home),
        "SPARK_HOME": str(spark.path),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    if is_local(master_of(trial)):
        environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    elif "spark.pyspark.python" not in trial.options_as(SparkOptions).conf:
        environment["PYSPARK_PYTHON"] = sys.executable
    return environment


def check_conf(conf: Mapping[str, str]) -> None:
    """Raise EnvironmentLacks for a configuration with which a barrier stage cannot run."""
    if conf.get("spark.dynamicAllocation.enabled", "false").strip().lower() == "true":
        raise EnvironmentLacks(
            "spark.dynamicAllocation.enabled is true, but a barrier stage needs all its slots at "
            "once (SPARK-24942); remove it or set it to false ([spark] conf, spark-submit --conf)"
        )


def _check_local_slots(trial: Trial) -> None:
    master = master_of(trial)
    inner = master.removeprefix("local").strip("[]").partition(",")[0]
    if inner == "*":
        return  # all cores, which check_cores has counted
    slots = int(inner) if inner.isdigit() else 1
    wanted = slots_per_node(trial) * trial.placement.nodes
    if slots < wanted:
        raise EnvironmentLacks(
            f'[spark] master "{master}" has {slots} slot(s), {trial.placement.ranks} barrier tasks '
            f"of {trial.placement.threads_per_rank} cpu(s) need {wanted}; use "
            f"local[{wanted}] or leave the master out"
        )
