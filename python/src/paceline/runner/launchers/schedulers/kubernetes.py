"""Trials as Kubernetes objects, a YAML file for each, and a script that applies one after another.

A ConfigMap holds the planned trial. Images are those of docker/, which have the environment and the
job scripts at fixed paths; data sets and runs are on a volume that all pods share.
"""

from __future__ import annotations

import math
import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.base.errors import UsageError
from paceline.base.version import __version__
from paceline.plan.spec.extensions import LAUNCHERS, load_object
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import rank_environment
from paceline.runner.launchers.base import rank_memory_mib
from paceline.runner.launchers.schedulers.files import (
    CannotRender,
    Places,
    Rendered,
    limit_s,
    render,
    shipped_trial,
    task_files,
    telemetry_paths,
    trial_text,
    with_script,
)

MOUNT = "/shared"
PYTHON = "/opt/paceline/venv/bin/python"
JOBS = "/opt/paceline/jobs"
_TRIAL_DIR = "/etc/paceline"
_TRIAL_FILE = "trial.json"
_USER = 1000  # of the images
_LONGEST_NAME = 40  # with the suffixes of operators it must fit a DNS label of 63 characters
_LONGEST_SUFFIX = "-r99"  # a spec has at most 100 repeats
_MIB_PER_GIB = 1024
_LEAST_MIB = 4 * _MIB_PER_GIB  # the estimate does not know activations and samples
KEPT_S = 7 * 24 * 3600  # objects that have ended, and the logs of their pods
_PODS_OF = "paceline-pods-of"  # label of the pods that need a machine each
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"  # https://kueue.sigs.k8s.io/docs/tasks/run


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """The settings that differ from cluster to cluster."""

    places: Places
    claim: str  # PersistentVolumeClaim, ReadWriteMany
    registry: str = ""  # prefix of the images' names, with its slash
    namespace: str | None = None
    service_account: str = "spark"  # with which drivers may start executors
    memory_gib: float | None = None  # per rank
    pull_secrets: tuple[str, ...] = ()  # of the registry
    node_selector: Mapping[str, str] = field(default_factory=dict)  # labels of nodes
    tolerations: tuple[Mapping[str, str], ...] = ()  # as in a pod; `toleration` makes one
    queue: str | None = None  # of Kueue
    gpu_resource: str | None = None  # name of a GPU in the cluster, such as nvidia.com/gpu

    def image(self, name: str) -> str:
        return f"{self.registry}{name}:{__version__}"

    def memory_mib(self, trial: Trial, ranks: int) -> int:
        """Return the memory of so many ranks: as given, else an estimate, at least 4 GiB each."""
        if self.memory_gib is not None:
            return math.ceil(ranks * self.memory_gib * _MIB_PER_GIB)
        return ranks * max(_LEAST_MIB, rank_memory_mib(trial))


def render_kubernetes(trials: Sequence[Trial], settings: KubernetesSettings) -> Rendered:
    """Return a YAML file for each trial, and the script that runs all of them in order."""
    import yaml  # noqa: PLC0415  (launchers import this module, and nothing else needs it)

    def files_of(repeats: list[Trial]) -> dict[str, str]:
        shared = _trial_map(repeats[0], settings)
        return {
            f"{trial.id}.yaml": yaml.safe_dump_all(
                [shared, _object(trial, settings)], sort_keys=False, width=100, explicit_start=True
            )
            for trial in repeats
        }

    rendered = render(trials, files_of)
    names = [name for trial in trials if (name := f"{trial.id}.yaml") in rendered.files]
    runs = [f"run {shlex.quote(name)}" for name in names]
    return with_script(rendered, [_SUBMIT, *runs, 'exit "$status"'])


# The states are those of Job, MPIJob and SparkApplication.
_SUBMIT = r"""#!/bin/bash
# Apply each trial when the one before it has ended; written by paceline render kubernetes.
# A trial that has ended already is not started again.
set -euo pipefail
cd "$(dirname "$0")"
conditions='{range .items[*]}{.status.conditions[?(@.status=="True")].type}'
conditions+=' {.status.applicationState.state} {end}'
status=0

run() {
    kubectl apply -f "$1"
    while state=" $(kubectl get -f "$1" -o jsonpath="$conditions") "; do
        case $state in
            *" Complete "*|*" Succeeded "*|*" COMPLETED "*) return ;;
            *" Failed "*|*" FAILED "*) echo "$1: failed" >&2; status=1; return ;;
        esac
        sleep 5
    done
    exit 1
}
"""


def _object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    """Return the launcher's object. Raises CannotRender."""
    hook = LAUNCHERS.get(trial.launcher).render_kubernetes
    if hook is None:
        raise CannotRender(f'launcher "{trial.launcher}" cannot be started by Kubernetes')
    if trial.device == "cuda" and settings.gpu_resource is None:
        raise CannotRender(
            'device "cuda" needs the name of a GPU in the cluster; add --gpu-resource, for example '
            "nvidia.com/gpu"
        )
    if trial.telemetry.enabled:
        paths = telemetry_paths(shipped_trial(trial, settings.places))
        hidden = [f"{k} = '{p}'" for k, p in paths.items() if not p.is_relative_to(MOUNT)]
        if hidden:
            raise CannotRender(f"pods see only {MOUNT}, not [telemetry] {', '.join(hidden)}")
    made: dict[str, Any] = load_object(hook)(trial, settings)
    return made


def object_name(trial: Trial) -> str:
    """Return a DNS label: a few words about the trial, and a number that makes it unique."""
    return f"{_configuration_name(trial)}-r{trial.repeat}"


def _configuration_name(trial: Trial) -> str:
    words = f"{trial.training.workload}-{trial.launcher}-{trial.local_strategy}"
    number = f"{zlib.crc32(trial.configuration.encode()):08x}"
    # All repeats share one ConfigMap, so its name must not depend on the repeat.
    longest = _LONGEST_NAME - len(number) - len("-") - len(_LONGEST_SUFFIX)
    words = re.sub(r"[^a-z0-9]+", "-", words.lower())[:longest].strip("-")
    return f"{words}-{number}"


def _trial_map(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    """Return the ConfigMap with the planned trial, for all repeats."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(_configuration_name(trial), settings),
        "data": {
            _TRIAL_FILE: trial_text(shipped_trial(trial, settings.places)),
            **task_files(trial),
        },
    }


def _metadata(name: str, settings: KubernetesSettings) -> dict[str, Any]:
    return with_values({"name": name, "namespace": settings.namespace})


# The following parts are for the objects of the launchers.


def with_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object, without empty ones."""
    return {name: value for name, value in fields.items() if value}


def metadata(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "paceline", _QUEUE_LABEL: settings.queue}
    return {
        **_metadata(object_name(trial), settings),
        "labels": with_values(labels),
        "annotations": {"paceline-trial": trial.id},
    }


def job_arguments(trial: Trial, settings: KubernetesSettings) -> list[str]:
    """Return the options of the job side."""
    return [
        "--trial", f"{_TRIAL_DIR}/{_TRIAL_FILE}",
        "--out", settings.places.run_dir,
        "--repeat", str(trial.repeat),
    ]  # fmt: skip


def environment(trial: Trial) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in rank_environment(trial).items()]


def toleration(text: str) -> dict[str, str]:
    """Return a toleration from KEY[=VALUE][:EFFECT], as `kubectl taint` writes a taint.

    Raises UsageError without a key.
    """
    taint, _, effect = text.partition(":")
    key, has_value, value = taint.partition("=")
    if not key:
        raise UsageError(f"toleration: expected KEY=VALUE:EFFECT, got {text!r}")
    operator = "Equal" if has_value else "Exists"
    return with_values({"key": key, "operator": operator, "value": value, "effect": effect})


def tolerations(settings: KubernetesSettings) -> list[dict[str, str]]:
    """Return the tolerations of a pod."""
    return [dict(each) for each in settings.tolerations]


def security_context() -> dict[str, Any]:
    """Return a container's security context that namespaces with the "restricted" Pod Security
    Standard accept."""
    return {
        "runAsUser": _USER,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def pod_security_context() -> dict[str, Any]:
    """Return a pod's security context: its volumes belong to the user of the images."""
    return {"fsGroup": _USER}


def apart_labels(trial: Trial) -> dict[str, str]:
    """Return the labels of pods that `apart` keeps on different machines."""
    return {_PODS_OF: object_name(trial)}


def apart(trial: Trial) -> dict[str, Any]:
    """Return the affinity with which no two pods of the trial share a machine.

    Two planned nodes on one machine would share its cores, memory and kernel.
    """
    term = {
        "labelSelector": {"matchLabels": apart_labels(trial)},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def gpus_on_node(trial: Trial) -> int:
    """Return the GPUs of a pod that has the ranks of a node: one for each rank."""
    return trial.placement.ranks_per_node if trial.device == "cuda" else 0


def volumes(trial: Trial, settings: KubernetesSettings) -> list[dict[str, Any]]:
    """Return the volumes: data sets and runs, the trial, and the memory that ranks share.

    Without a volume for it, a pod has 64 MiB of shared memory.
    """
    return [
        {"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "trial", "configMap": {"name": _configuration_name(trial)}},
    ]


def mounts() -> list[dict[str, str]]:
    return [
        {"name": "shared", "mountPath": MOUNT},
        {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108  (the place of shared memory)
        {"name": "trial", "mountPath": _TRIAL_DIR},
    ]


def pod(
    name: str,
    image: str,
    command: list[str],
    trial: Trial,
    settings: KubernetesSettings,
    *,
    has_ranks: bool = True,
) -> dict[str, Any]:
    """Return a pod template with the resources of a node's ranks, or else of one process."""
    place = trial.placement
    ranks, cores = (place.ranks_per_node, place.cores_per_node) if has_ranks else (1, 1)
    # Equal requests and limits: no other pod can take what the measurement uses.
    resources = {"cpu": str(cores), "memory": f"{settings.memory_mib(trial, ranks)}Mi"}
    if has_ranks and gpus_on_node(trial):
        assert settings.gpu_resource is not None, "refused before"
        resources[settings.gpu_resource] = str(gpus_on_node(trial))
    container = {
        "name": name,
        "image": settings.image(image),
        "command": command,
        "env": environment(trial),
        "securityContext": security_context(),
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": mounts(),
    }
    spec = {
        "automountServiceAccountToken": False,  # no rank talks to the cluster
        "securityContext": pod_security_context(),
        "imagePullSecrets": [{"name": secret} for secret in settings.pull_secrets],
        "nodeSelector": dict(settings.node_selector),
        "tolerations": tolerations(settings),
        "containers": [container],
        "volumes": volumes(trial, settings),
    }
    return {"spec": {name: value for name, value in spec.items() if value not in ([], {})}}


def single_pod_job(
    arguments: list[str], trial: Trial, settings: KubernetesSettings
) -> dict[str, Any]:
    """Return a Job of one pod, for launchers that start ranks on one node only.

    arguments: of Python, before those of the job side.
    """
    command = [PYTHON, *arguments, *job_arguments(trial, settings)]
    template = pod("trial", "paceline", command, trial, settings)
    template["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(trial, settings),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": limit_s(trial),
            "ttlSecondsAfterFinished": KEPT_S,
            "template": template,
        },
    }
