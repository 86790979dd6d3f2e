"""Published models of Kubernetes and its operators, against which rendered objects are checked.

Kubeflow publishes its models and those of Kubernetes as packages, generated from the OpenAPI
documents of the projects: kubeflow-spark-api (SparkApplication v1beta2) and kubeflow-trainer-api
(Job, ConfigMap, pod templates). No package contains MPIJob v2beta1: its own keys are written
down here from pkg/apis/kubeflow/v2beta1/types.go of https://github.com/kubeflow/mpi-operator, and
its pod templates are checked against the model of Kubernetes.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import jsonschema
from kubeflow_spark_api.models import SparkV1beta2SparkApplication
from kubeflow_trainer_api.models import (
    IoK8sApiBatchV1Job,
    IoK8sApiCoreV1ConfigMap,
    IoK8sApiCoreV1PodTemplateSpec,
)


class Model(Protocol):
    """A generated model; it refuses values of wrong types."""

    @classmethod
    def from_dict(cls, obj: dict[str, Any] | None) -> Any: ...


_MODELS: dict[tuple[str, str], type[Model]] = {
    ("sparkoperator.k8s.io/v1beta2", "SparkApplication"): SparkV1beta2SparkApplication,
    ("batch/v1", "Job"): IoK8sApiBatchV1Job,
    ("v1", "ConfigMap"): IoK8sApiCoreV1ConfigMap,
}
# RFC 1123 label; 40, so that what the operators append stays below 63
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 40
_COUNT = {"type": "integer", "minimum": 1}


def _closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_REPLICA = _closed(
    {
        "replicas": _COUNT,
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {"type": "object"},
    },
    "template",
)
_MPI_JOB_SPEC = _closed(
    {
        "slotsPerWorker": _COUNT,
        "runPolicy": _closed(
            {
                "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
                "backoffLimit": {"type": "integer", "minimum": 0},
                "activeDeadlineSeconds": _COUNT,
                "ttlSecondsAfterFinished": _COUNT,
            }
        ),
        "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
        "sshAuthMountPath": {"type": "string"},
        "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
        "mpiReplicaSpecs": _closed({"Launcher": _REPLICA, "Worker": _REPLICA}, "Launcher"),
    },
    "mpiReplicaSpecs",
)


def check(document: dict[str, Any]) -> None:
    """Raise an error unless the object is one that Kubernetes and its operator know."""
    name = document["metadata"]["name"]
    assert _NAME.fullmatch(name), name
    assert len(name) <= _LONGEST_NAME, name
    kind = (document["apiVersion"], document["kind"])
    if kind != ("kubeflow.org/v2beta1", "MPIJob"):
        _check_model(_MODELS[kind], document)
        return
    jsonschema.validate(document["spec"], _MPI_JOB_SPEC)
    for replica in document["spec"]["mpiReplicaSpecs"].values():
        _check_model(IoK8sApiCoreV1PodTemplateSpec, replica["template"])


def _check_model(model: type[Model], document: dict[str, Any]) -> None:
    """Compare with what the model keeps: it ignores a key that does not exist."""
    kept = model.from_dict(document).to_dict()
    assert kept == document
