"""Launcher `spark` under schedulers: a cluster in a Slurm job, and the SparkApplication.

SparkApplication: v1beta2 of the Kubeflow Spark operator, https://github.com/kubeflow/spark-operator.
"""

from __future__ import annotations

import shlex
from importlib import metadata as package_metadata
from typing import TYPE_CHECKING, Any

from paceline.launchers.schedulers.files import CannotRender
from paceline.launchers.schedulers.kubernetes import (
    JOBS,
    PYTHON,
    environment,
    job_arguments,
    metadata,
    mounts,
    volumes,
)
from paceline.launchers.schedulers.slurm import SlurmStep
from paceline.launchers.spark.configuration import configuration, driver_memory, slots_per_node
from paceline.launchers.spark.descriptor import SparkOptions

if TYPE_CHECKING:
    from paceline.launchers.schedulers.kubernetes import KubernetesSettings
    from paceline.launchers.schedulers.slurm import SlurmSettings
    from paceline.plan.trial import Trial

_MASTER = "k8s://https://kubernetes.default.svc"
# The operator sets these from keys of its own.
_SET_BY_OPERATOR = ("spark.executor.instances", "spark.executor.cores", "spark.executor.memory")


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task per node, for Spark's workers; the batch script starts them and the driver.

    Executors start with the cores that the master offers, so Slurm gives each task all of them.
    """
    command = shlex.join([settings.python, "-m", "paceline.launchers.spark.slurm_job"])
    return SlurmStep(command=command, cpus_per_task=slots_per_node(trial))


def kubernetes_object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    """Return a SparkApplication with one executor per node. Raises CannotRender."""
    if trial.transport == "mpi":
        raise CannotRender("pods of executors have no ssh server for the MPI job inside Spark")
    place, options = trial.placement, trial.options_as(SparkOptions)
    on_cluster = trial.model_copy(
        update={"launcher_options": options.model_copy(update={"master": _MASTER})}
    )
    conf = {**configuration(on_cluster), "spark.pyspark.python": PYTHON, **options.conf}
    return {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": metadata(trial, settings),
        "spec": {
            "type": "Python",
            "pythonVersion": "3",
            "sparkVersion": package_metadata.version("pyspark"),
            "mode": "cluster",
            "image": settings.image("paceline-spark"),
            "mainApplicationFile": f"local://{JOBS}/spark-jobs/train.py",
            "arguments": job_arguments(trial, settings),
            "sparkConf": {k: v for k, v in conf.items() if k not in _SET_BY_OPERATOR},
            "restartPolicy": {"type": "Never"},  # a retry in place would not be a repeat
            "volumes": volumes(trial, settings),
            "driver": {
                "cores": 1,
                "memory": driver_memory(trial),
                "serviceAccount": settings.service_account,
                "env": environment(trial),
                "volumeMounts": mounts(),
            },
            "executor": {
                "instances": place.nodes,
                "cores": slots_per_node(trial),
                "coreRequest": str(place.cores_per_node),
                "memory": conf.get("spark.executor.memory", "1g"),
                # Ranks are Python processes beside the JVM.
                "memoryOverhead": f"{settings.memory_mib(place.ranks_per_node)}m",
                "volumeMounts": mounts(),
            },
        },
    }
