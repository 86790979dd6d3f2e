"""`spark`: spark-submit of `spark-jobs/train.py`, one barrier task per rank, and under schedulers.

SparkApplication: v1beta2 of the Kubeflow Spark operator, https://github.com/kubeflow/spark-operator.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from importlib import metadata as package_metadata
from typing import Any

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.programs import MachineFinding, job_script, tool_finding, why_it_failed
from paceline.base.host.spark import (
    QUICK_JVM,
    find_java,
    find_java_for_spark,
    find_spark,
    homes,
    site_settings,
)
from paceline.measure.records.layout import TrialFiles
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import rank_environment
from paceline.runner.launchers.base import Command, TemporaryFolders, first_named
from paceline.runner.launchers.descriptors import SparkOptions, is_local
from paceline.runner.launchers.mpi.implementations import OpenMpi5
from paceline.runner.launchers.mpi.launcher import check_mpi
from paceline.runner.launchers.schedulers.files import CannotRender
from paceline.runner.launchers.schedulers.kubernetes import (
    JOBS,
    KEPT_S,
    PYTHON,
    KubernetesSettings,
    apart,
    apart_labels,
    environment,
    gpus_on_node,
    job_arguments,
    metadata,
    mounts,
    pod_security_context,
    security_context,
    tolerations,
    volumes,
    with_values,
)
from paceline.runner.launchers.schedulers.slurm import SlurmSettings, SlurmStep
from paceline.runner.launchers.spark.class_archive import archive_option, archive_option_of_java
from paceline.runner.launchers.spark.configuration import (
    check_conf,
    configuration,
    driver_memory,
    master_of,
    slots_per_node,
)
from paceline.runner.preflight.this_host import check_trial

_SLOTS_S = 15.0  # for executors to start; on a free host they need a few seconds
_DRIVER_S = 180.0  # a driver gives up a master that does not answer after a minute
# Spark's message for a task whose Python worker has died.
LOST_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")


class SparkLauncher:
    """Configures Spark so that with a local master nothing listens beyond this node, nothing is
    retried, and nothing waits for slots that never come. The spec's `spark.conf` overrides this."""

    def preflight(self, trial: Trial) -> None:
        find_java_for_spark()
        job_script("spark-jobs", "train.py")
        check_conf(trial.options_as(SparkOptions).conf)
        if trial.transport == "mpi" and _runs_on_this_python(trial):
            _check_mpi(trial)
        if is_local(master_of(trial)):
            check_trial(trial)
            _check_local_slots(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        command = submission(trial)
        script = job_script("spark-jobs", "train.py")
        argv = (*command.argv, str(script), "--trial", str(files.trial))
        return dataclasses.replace(command, argv=argv, temporary=partial(_temporary, trial))

    def failed_rank(self, log_text: str) -> int | None:
        return first_named((LOST_TASK,), log_text)


def submission(trial: Trial) -> Command:
    """Return the command of spark-submit up to the job script."""
    spark = find_spark()
    argv = [str(spark.path / "bin" / "spark-submit"), "--master", master_of(trial)]
    # A site may have another default, but the driver here starts and ends with the trial.
    argv += ["--deploy-mode", "client", "--driver-memory", driver_memory(trial)]
    conf = {
        **_python(),
        **configuration(trial, site_settings(spark), archive_option(find_java(), spark)),
        **trial.options_as(SparkOptions).conf,
    }
    for name, value in conf.items():
        argv += ["--conf", f"{name}={value}"]
    return Command(argv=tuple(argv), environment=_environment(trial))


def _check_mpi(trial: Trial) -> None:
    mpirun = check_mpi(trial)
    if not isinstance(mpirun.implementation, OpenMpi5):
        raise EnvironmentLacks(
            f"transport mpi under Spark: expected Open MPI 5, {mpirun.path} belongs to "
            f"{mpirun.implementation.name} ({mpirun.version}); the daemons of other "
            "implementations cannot be started by barrier tasks. Choose an Open MPI 5 with [mpi] "
            "mpirun, or use launcher mpi or transport gloo"
        )


def _runs_on_this_python(trial: Trial) -> bool:
    """Return whether tasks use this Python, and with it the MPI that can be checked here."""
    conf = trial.options_as(SparkOptions).conf
    return is_local(master_of(trial)) or "spark.pyspark.python" not in conf


def _python() -> dict[str, str]:
    """Return the settings of the Python of executors and driver.

    A spec that sends an environment to the executors sets the first one, which would then be the
    driver's as well, before any environment variable.
    """
    return {"spark.pyspark.python": sys.executable, "spark.pyspark.driver.python": sys.executable}


def _environment(trial: Trial) -> dict[str, str]:
    # spark-submit starts a first JVM, which only writes the command of the second one.
    own = os.environ.get("SPARK_LAUNCHER_OPTS", "")
    launcher = f"{QUICK_JVM} {archive_option_of_java(find_java())} {own}"
    local = {"SPARK_LOCAL_IP": "127.0.0.1"} if is_local(master_of(trial)) else {}
    return {
        **rank_environment(trial),
        **homes(find_java(), find_spark()),
        "SPARK_LAUNCHER_OPTS": " ".join(launcher.split()),
        **local,
    }


def _temporary(trial: Trial, folders: TemporaryFolders) -> dict[str, str]:
    """Return the variables for temporary files of the driver, and of tasks in its process."""
    folder = str(folders.disk)
    # Spark splits the options at spaces, and reads quotes as a shell does.
    own = os.environ.get("SPARK_SUBMIT_OPTS", "")
    java = f"{own} -Djava.io.tmpdir={shlex.quote(folder)}".lstrip()
    variables = {"SPARK_SUBMIT_OPTS": java}
    is_own = "SPARK_LOCAL_DIRS" in os.environ
    if not is_own and "spark.local.dir" not in trial.options_as(SparkOptions).conf:
        variables["SPARK_LOCAL_DIRS"] = folder
    if trial.transport == "mpi" and is_local(master_of(trial)):
        variables |= OpenMpi5().temporary(folders)
    return variables


def _check_local_slots(trial: Trial) -> None:
    master = master_of(trial)
    inner = master.removeprefix("local").strip("[]").partition(",")[0]
    if inner == "*":
        return  # all cores, which check_trial has counted
    slots = int(inner) if inner.isdigit() else 1
    wanted = slots_per_node(trial) * trial.placement.nodes
    if slots < wanted:
        raise EnvironmentLacks(
            f'[spark] master "{master}" has {slots} slot(s), {trial.placement.ranks} barrier tasks '
            f"of {trial.placement.threads_per_rank} cpu(s) need {wanted}; use "
            f"local[{wanted}] or leave the master out"
        )


def checks() -> list[MachineFinding]:
    """Return what `paceline doctor` shows about this launcher."""
    return [tool_finding("Java", find_java_for_spark), tool_finding("Spark", find_spark)]


def cluster_checks(master: str, slots: int) -> list[MachineFinding]:
    """Return what `paceline doctor --master` shows about a cluster that should have free slots."""
    return [_free_slots(master, slots)]


def _free_slots(master: str, wanted: int) -> MachineFinding:
    slots = [sys.executable, "-P", "-m", "paceline.runner.launchers.spark.slots"]
    what = "Spark slots"
    try:
        environment = {**os.environ, **homes(find_java(), find_spark())}
        ended = subprocess.run(
            [*slots, master, str(wanted), str(_SLOTS_S)],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_DRIVER_S, check=False,
        )  # fmt: skip
    except (EnvironmentLacks, subprocess.TimeoutExpired) as error:
        return MachineFinding(what=what, ok=False, found="not counted", why=str(error))
    if ended.returncode != 0:
        why = f"{why_it_failed(ended)}; look at the address and the log of the master {master}"
        return MachineFinding(what=what, ok=False, found="not counted", why=why)
    counted = ended.stdout.split()[-1]
    ok = not counted.isdigit() or int(counted) >= wanted
    return MachineFinding(
        what=what,
        ok=ok,
        found=f"{counted} of {wanted}",
        why=f"of one core each, free at {master}"
        if ok
        else f"{master} has no more free after {_SLOTS_S:g} s; use fewer ranks, or more or bigger "
        "workers, or wait for other jobs",
    )


_MASTER = "k8s://https://kubernetes.default.svc"
# The operator sets these from keys of its own.
_SET_BY_OPERATOR = tuple(
    f"spark.executor.{name}" for name in ("instances", "cores", "memory", "memoryOverhead")
)


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task per node, for Spark's workers; the batch script starts them and the driver.

    Executors start with the cores that the master offers, so Slurm gives each task all of them.
    """
    command = shlex.join([settings.python, "-m", "paceline.runner.launchers.spark.slurm_job"])
    return SlurmStep(command=command, cpus_per_task=slots_per_node(trial))


def _of_each_pod(settings: KubernetesSettings) -> dict[str, Any]:
    """Return what driver and executors have in common; new, or YAML would show an alias."""
    return with_values(
        {
            "podSecurityContext": pod_security_context(),
            "securityContext": security_context(),
            "tolerations": tolerations(settings),
            "volumeMounts": mounts(),
        }
    )


def _gpus(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    """Return the field `gpu` of the executors, if their ranks use GPUs."""
    count = gpus_on_node(trial)
    return {"gpu": {"name": settings.gpu_resource, "quantity": count}} if count else {}


def kubernetes_object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    """Return a SparkApplication with one executor per node. Raises CannotRender."""
    if trial.transport == "mpi":
        raise CannotRender("pods of executors have no ssh server for the MPI job inside Spark")
    place, options = trial.placement, trial.options_as(SparkOptions)
    on_cluster = trial.model_copy(
        update={"launcher_options": options.model_copy(update={"master": _MASTER})}
    )
    conf = {
        **configuration(on_cluster),
        "spark.authenticate": "true",  # in Kubernetes Spark creates the secret itself
        "spark.pyspark.python": PYTHON,
        **options.conf,
    }
    of_all_pods = {
        "imagePullSecrets": list(settings.pull_secrets),
        "nodeSelector": dict(settings.node_selector),
    }
    return {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": metadata(trial, settings),
        "spec": {
            "type": "Python",
            "sparkVersion": package_metadata.version("pyspark"),
            "mode": "cluster",
            "image": settings.image("paceline-spark"),
            **with_values(of_all_pods),
            "mainApplicationFile": f"local://{JOBS}/spark-jobs/train.py",
            "arguments": job_arguments(trial, settings),
            "sparkConf": {k: v for k, v in conf.items() if k not in _SET_BY_OPERATOR},
            "timeToLiveSeconds": KEPT_S,
            "restartPolicy": {"type": "Never"},  # a retry in place would not be a repeat
            "volumes": volumes(trial, settings),
            "driver": {
                "cores": 1,
                "memory": driver_memory(trial),
                "serviceAccount": settings.service_account,
                "env": environment(trial),
                **_of_each_pod(settings),
            },
            "executor": {
                "instances": place.nodes,
                "cores": slots_per_node(trial),
                # Equal, as for other launchers: else ranks under Spark could use more cores.
                "coreRequest": str(place.cores_per_node),
                "coreLimit": str(place.cores_per_node),
                "memory": conf.get("spark.executor.memory", "1g"),
                # Ranks are Python processes beside the JVM.
                "memoryOverhead": f"{settings.memory_mib(trial, place.ranks_per_node)}m",
                "labels": apart_labels(trial),
                "affinity": apart(trial),
                **_gpus(trial, settings),
                **_of_each_pod(settings),
            },
        },
    }
