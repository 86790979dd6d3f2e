"""`spark`: spark-submit of `spark-jobs/train.py`, one barrier task a rank."""

from __future__ import annotations

import math
import os
import re
import sys
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.tools import MPIRUN_VARIABLE, find_java, find_spark, job_script
from paceline.job.checks import check_cores, check_dataset
from paceline.job.environment import rank_environment
from paceline.launchers.base import OWN_FAILURE, Command
from paceline.launchers.mpi.launcher import check_mpi
from paceline.launchers.spark.native import driver_memory, liveness_settings, native_settings

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles

_FAILURES = (OWN_FAILURE, re.compile(r"barrier task ResultTask\(\d+, (\d+)\)"))
_LOCAL = re.compile(r"local(\[[^\]]*\])?")
# The JVM only hands tasks out: Spark's start-up is mostly class loading and compiling, which the
# first compiler alone does with half the CPU time (measured: 4.7 s -> 2.6 s of CPU).
_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"


class SparkLauncher:
    """Spark set so that nothing listens beyond this node for a local master, nothing is retried,
    and nobody waits for slots that do not come. The spec's `spark.conf` has the last word."""

    name = "spark"

    def preflight(self, trial: Trial) -> None:
        find_java()
        find_spark()
        job_script("spark-jobs", "train.py")
        _refuse_dynamic_allocation(trial.spark.conf)
        if trial.transport == "mpi" and _runs_on_this_python(trial):
            check_mpi(trial)
        if is_local(master_of(trial)):
            check_dataset(trial.training.dataset)
            check_cores(trial)
            _check_local_slots(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        spark = find_spark()
        argv = [str(spark.path / "bin" / "spark-submit"), "--master", master_of(trial)]
        argv += ["--name", trial.id, "--driver-memory", driver_memory(trial)]
        for name, value in {**configuration(trial), **trial.spark.conf}.items():
            argv += ["--conf", f"{name}={value}"]
        script = job_script("spark-jobs", "train.py")
        argv += [str(script), "--trial", str(files.trial)]
        return Command(argv=tuple(argv), environment=_environment(trial))

    def failed_rank(self, log_text: str) -> int | None:
        for pattern in _FAILURES:
            found = pattern.search(log_text)
            if found:
                return int(found.group(1))
        return None


def _runs_on_this_python(trial: Trial) -> bool:
    """Whether tasks have the Python, and with it the MPI, that can be looked at here."""
    return is_local(master_of(trial)) or "spark.pyspark.python" not in trial.spark.conf


def master_of(trial: Trial) -> str:
    """The spec's master, else this node with as many slots as the trial takes."""
    return trial.spark.master or f"local[{_slots_per_node(trial) * trial.placement.nodes}]"


def _slots_per_node(trial: Trial) -> int:
    """What Spark calls cores, one a thread: more than there are where ranks share cores."""
    return trial.placement.ranks_per_node * trial.placement.threads_per_rank


def is_local(master: str) -> bool:
    """Whether the master is the driver itself (`local-cluster[…]` starts processes, so no)."""
    return _LOCAL.fullmatch(master) is not None


def configuration(trial: Trial) -> dict[str, str]:
    """What Spark is told about a trial, but for what the spec itself sets."""
    threads = trial.placement.threads_per_rank
    conf = {
        "spark.task.cpus": str(threads),
        "spark.dynamicAllocation.enabled": "false",
        "spark.task.maxFailures": "1",
        "spark.stage.maxConsecutiveAttempts": "1",
        "spark.speculation": "false",
        # The default is a year.
        "spark.barrier.sync.timeout": str(math.ceil(trial.limits.rendezvous_s)),
        # The default waits 10 minutes for slots, 40 checks 15 s apart, with only a warning.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
        "spark.python.worker.reuse": "false",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        "spark.driver.extraJavaOptions": _QUICK_JVM,
        "spark.executor.extraJavaOptions": _QUICK_JVM,
        **native_settings(trial),
    }
    if is_local(master_of(trial)):
        # With a local master Spark makes the secret itself.
        conf |= {
            "spark.authenticate": "true",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
    else:
        own = {k: v for k, v in os.environ.items() if k == MPIRUN_VARIABLE}
        ranks = {**rank_environment(trial), **own}
        conf |= {f"spark.executorEnv.{k}": v for k, v in ranks.items()}
        conf |= {**cluster_shape(trial), **liveness_settings(trial)}
    return conf


def cluster_shape(trial: Trial) -> dict[str, str]:
    """Cores that are taken of a cluster, and how: one executor a node if there are several."""
    place = trial.placement
    shape = {
        "spark.cores.max": str(_slots_per_node(trial) * place.nodes),
        # The session is up when all executors are, not when the first is; it waits 30 s for them.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    }
    if place.nodes > 1:
        shape["spark.executor.cores"] = str(_slots_per_node(trial))
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
    elif "spark.pyspark.python" not in trial.spark.conf:
        environment["PYSPARK_PYTHON"] = sys.executable
    return environment


def _refuse_dynamic_allocation(conf: dict[str, str]) -> None:
    if conf.get("spark.dynamicAllocation.enabled", "false").strip().lower() == "true":
        raise EnvironmentLacks(
            "[spark] conf: spark.dynamicAllocation.enabled is true, but a barrier stage needs all "
            "its slots at once (SPARK-24942); leave it out or set it to false"
        )


def _check_local_slots(trial: Trial) -> None:
    master = master_of(trial)
    inner = master.removeprefix("local").strip("[]").partition(",")[0]
    if inner == "*":
        return  # all cores: check_cores has counted them
    slots = int(inner) if inner.isdigit() else 1
    wanted = _slots_per_node(trial) * trial.placement.nodes
    if slots < wanted:
        raise EnvironmentLacks(
            f'[spark] master "{master}" has {slots} slot(s), {trial.placement.ranks} barrier tasks '
            f"of {trial.placement.threads_per_rank} cpu(s) need {wanted}; use "
            f"local[{wanted}] or leave the master out"
        )
