"""Trials as Kubernetes objects: a SparkApplication, an MPIJob, or for a single node a Job.

One file a configuration, with an object for each repeat. SparkApplication is v1beta2 of
https://github.com/kubeflow/spark-operator, MPIJob v2beta1 of
https://github.com/kubeflow/mpi-operator. Images are those of docker/, which have the environment
and the job scripts at one place; data sets and runs lie on a volume that all pods share.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import yaml

from paceline import __version__
from paceline.job.environment import rank_environment
from paceline.launchers.mpi.launcher import interface_parameters
from paceline.launchers.spark.launcher import configuration
from paceline.launchers.spark.native import driver_memory
from paceline.render.arguments import job_arguments, telemetry_paths, why_not
from paceline.render.places import LeftOut, Places, Rendered, by_configuration, limit_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial

MOUNT = "/shared"
PYTHON = "/opt/paceline/venv/bin/python"
JOBS = "/opt/paceline/jobs"
_USER = 1000  # of the images
_SSH_DIR = "/home/paceline/.ssh"
_SSH_PORT = 2222  # an ordinary user may listen there
_HOSTFILE = "/etc/mpi/hostfile"  # where the MPI operator puts it
_MASTER = "k8s://https://kubernetes.default.svc"
_LONGEST_NAME = 40  # what operators add to it must fit a DNS label, 63 characters
_MIB_PER_GIB = 1024
# what the operators set by their own keys
_SET_BY_OPERATOR = ("spark.executor.instances", "spark.executor.cores", "spark.executor.memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """What differs from cluster to cluster."""

    places: Places
    claim: str  # PersistentVolumeClaim, ReadWriteMany
    registry: str = ""  # before the images' names, with its slash
    namespace: str | None = None
    service_account: str = "spark"  # that drivers may start executors with
    memory_gib: float = 4.0  # for each rank


def render_kubernetes(
    trials: Sequence[Trial], settings: KubernetesSettings
) -> tuple[list[Rendered], list[LeftOut]]:
    """A YAML file for each configuration, and why some have none."""
    rendered: list[Rendered] = []
    left_out: list[LeftOut] = []
    for repeats in by_configuration(trials):
        reason = _why_not(repeats[0])
        if reason is not None:
            left_out.append(LeftOut(configuration=repeats[0].configuration, reason=reason))
            continue
        name = f"{repeats[0].configuration}.yaml"
        objects = [_object(trial, settings) for trial in repeats]
        text = yaml.safe_dump_all(objects, sort_keys=False, width=100, explicit_start=True)
        rendered.append(Rendered(name=name, text=text, command=f"kubectl apply -f {name}"))
    return rendered, left_out


def _why_not(trial: Trial) -> str | None:
    if trial.device == "cuda":
        return "how a cluster names its GPUs is not known here"
    if trial.launcher == "spark" and trial.transport == "mpi":
        return "executors' pods have no ssh daemon for the MPI job that they would start"
    return _why_not_telemetry(trial) or why_not(trial)


def _why_not_telemetry(trial: Trial) -> str | None:
    if not trial.telemetry.enabled:
        return None
    elsewhere = [
        f"{name} = {str(path)!r}"
        for name, path in telemetry_paths(trial).items()
        if not path.is_relative_to(MOUNT)
    ]
    if not elsewhere:
        return None
    return f"pods see nothing but {MOUNT} of [telemetry] {', '.join(elsewhere)}"


def _object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    if trial.launcher == "spark":
        return _spark_application(trial, settings)
    if trial.launcher == "mpi":
        return _mpi_job(trial, settings)
    return _job(trial, settings)


def object_name(trial: Trial) -> str:
    """A DNS label: what the trial is in words, and a number that tells it from all others."""
    words = f"{trial.training.workload}-{trial.launcher}-{trial.local_strategy}"
    number = f"{zlib.crc32(trial.configuration.encode()):08x}-r{trial.repeat}"
    words = re.sub(r"[^a-z0-9]+", "-", words.lower())[: _LONGEST_NAME - len(number) - 1].strip("-")
    return f"{words}-{number}"


def _spark_application(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    place = trial.placement
    on_cluster = trial.model_copy(
        update={"spark": trial.spark.model_copy(update={"master": _MASTER})}
    )
    conf = {**configuration(on_cluster), "spark.pyspark.python": PYTHON, **trial.spark.conf}
    heap = conf.get("spark.executor.memory", "1g")
    slots = place.ranks_per_node * place.threads_per_rank
    overhead_mib = math.ceil(place.ranks_per_node * settings.memory_gib * _MIB_PER_GIB)
    return {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": _metadata(trial, settings),
        "spec": {
            "type": "Python",
            "pythonVersion": "3",
            "sparkVersion": metadata.version("pyspark"),
            "mode": "cluster",
            "image": _image("paceline-spark", settings),
            "mainApplicationFile": f"local://{JOBS}/spark-jobs/train.py",
            "arguments": _arguments(trial, settings),
            "sparkConf": {k: v for k, v in conf.items() if k not in _SET_BY_OPERATOR},
            "restartPolicy": {"type": "Never"},  # a trial that was repeated in place is no repeat
            "volumes": _volumes(settings),
            "driver": {
                "cores": 1,
                "memory": driver_memory(trial),
                "serviceAccount": settings.service_account,
                "env": _env(trial),
                "volumeMounts": _mounts(),
            },
            "executor": {
                "instances": place.nodes,
                "cores": slots,
                "coreRequest": str(place.cores_per_node),
                "memory": heap,
                # ranks are Python processes beside the JVM
                "memoryOverhead": f"{overhead_mib}m",
                "volumeMounts": _mounts(),
            },
        },
    }


def _mpi_job(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    place = trial.placement
    ssh = f"-p {_SSH_PORT} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    mapping = f"ppr:{place.ranks_per_node}:node" + (":OVERSUBSCRIBE" if place.oversubscribe else "")
    command = ["mpirun", "-n", str(place.ranks), "--hostfile", _HOSTFILE, "--map-by", mapping]
    command += ["--bind-to", "none", "--prtemca", "plm_ssh_args", ssh]
    command += interface_parameters(trial) if place.nodes > 1 else ["--mca", "btl", "self,sm"]
    for name in rank_environment(trial):
        command += ["-x", name]
    command += [*trial.mpi.arguments, PYTHON, f"{JOBS}/mpi-jobs/train.py"]
    command += _arguments(trial, settings)
    image = _image("paceline-mpi", settings)
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": _metadata(trial, settings),
        "spec": {
            "slotsPerWorker": place.ranks_per_node,
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": 0,
                "activeDeadlineSeconds": limit_s(trial),
            },
            "sshAuthMountPath": _SSH_DIR,
            "mpiImplementation": "OpenMPI",
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": _pod("launcher", image, command, trial, settings, cores=1),
                },
                "Worker": {
                    "replicas": place.nodes,
                    "restartPolicy": "Never",
                    "template": _pod(
                        "worker", image, _sshd(), trial, settings, cores=place.cores_per_node
                    ),
                },
            },
        },
    }


def _sshd() -> list[str]:
    """As an ordinary user, with the keys that the operator makes; Debian's PATH lacks ours."""
    options = {
        "HostKey": f"{_SSH_DIR}/id_rsa",
        "AuthorizedKeysFile": f"{_SSH_DIR}/authorized_keys",
        "PidFile": "/tmp/sshd.pid",  # noqa: S108  (in a pod of its own)
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "SetEnv": "PATH=/opt/paceline/venv/bin:/usr/local/bin:/usr/bin:/bin",
    }
    command = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-p", str(_SSH_PORT)]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    return command


def _job(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    """Launchers that start ranks on one node only."""
    command = [PYTHON, "-m", "paceline.launchers.local"]
    if trial.launcher == "torchrun":
        command = [PYTHON, "-m", "torch.distributed.run", "--nnodes=1"]
        command += [f"--nproc-per-node={trial.placement.ranks}", "--max-restarts=0"]
        command += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
        command += ["--rdzv-endpoint=/tmp/paceline.rendezvous", "--rdzv-id=paceline"]
        command += ["--local-addr=127.0.0.1", "-m", "paceline.launchers.local"]
    command += _arguments(trial, settings)
    image = _image("paceline", settings)
    cores = trial.placement.cores_per_node
    template = _pod("trial", image, command, trial, settings, cores=cores)
    template["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(trial, settings),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": limit_s(trial),
            "template": template,
        },
    }


def _pod(
    name: str,
    image: str,
    command: list[str],
    trial: Trial,
    settings: KubernetesSettings,
    *,
    cores: int,
) -> dict[str, Any]:
    ranks = trial.placement.ranks_per_node
    memory_mib = math.ceil(
        (1 if name == "launcher" else ranks) * settings.memory_gib * _MIB_PER_GIB
    )
    # equal requests and limits: no neighbour takes what was measured with
    resources = {"cpu": str(cores), "memory": f"{memory_mib}Mi"}
    container = {
        "name": name,
        "image": image,
        "command": command,
        "env": _env(trial),
        "securityContext": {"runAsUser": _USER},
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": _mounts(),
    }
    security = {"fsGroup": _USER}
    return {
        "spec": {
            "securityContext": security,
            "containers": [container],
            "volumes": _volumes(settings),
        }
    }


def _metadata(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    namespace = {} if settings.namespace is None else {"namespace": settings.namespace}
    return {
        "name": object_name(trial),
        **namespace,
        "labels": {"app.kubernetes.io/name": "paceline"},
        "annotations": {"paceline-trial": trial.id},
    }


def _image(name: str, settings: KubernetesSettings) -> str:
    return f"{settings.registry}{name}:{__version__}"


def _arguments(trial: Trial, settings: KubernetesSettings) -> list[str]:
    places = settings.places
    arguments = job_arguments(trial, data=places.dataset(trial), run_dir=places.run_dir)
    return [*arguments, "--repeat", str(trial.repeat)]


def _env(trial: Trial) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in rank_environment(trial).items()]


def _volumes(settings: KubernetesSettings) -> list[dict[str, Any]]:
    """Data sets and runs; and memory that ranks share, of which pods have 64 MiB otherwise."""
    return [
        {"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]


def _mounts() -> list[dict[str, str]]:
    return [
        {"name": "shared", "mountPath": MOUNT},
        {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108  (where shared memory is)
    ]
