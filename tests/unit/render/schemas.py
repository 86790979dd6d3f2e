"""The parts of the custom resources' schemas that are rendered, as JSON schemas.

Written down from the types of the operators, every object closed, so that a misspelt field fails:

- SparkApplication v1beta2: https://github.com/kubeflow/spark-operator,
  api/v1beta2/sparkapplication_types.go (and the CRD that controller-gen makes of it)
- MPIJob v2beta1: https://github.com/kubeflow/mpi-operator,
  manifests/base/kubeflow.org_mpijobs.yaml, pkg/apis/kubeflow/v2beta1/types.go
- Job, pod templates, volumes, ConfigMap: Kubernetes API reference, batch/v1 and core/v1
"""

from __future__ import annotations

from typing import Any

_STRING = {"type": "string"}
_STRINGS = {"type": "array", "items": _STRING}
_STRING_MAP = {"type": "object", "additionalProperties": _STRING}
_LEAST_ONE = {"type": "integer", "minimum": 1}
_QUANTITY = {
    "type": "string",
    "pattern": r"^\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$",
}  # apimachinery, pkg/api/resource
_SPARK_MEMORY = {"type": "string", "pattern": r"^\d+[kmgt]$"}  # Spark's JVM memory strings
# RFC 1123 label; 40, so that what the operators append stays below 63
_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 40}


def _closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_METADATA = _closed(
    {"name": _NAME, "namespace": _NAME, "labels": _STRING_MAP, "annotations": _STRING_MAP}, "name"
)
_ENV = {"type": "array", "items": _closed({"name": _STRING, "value": _STRING}, "name")}
_MOUNTS = {
    "type": "array",
    "items": _closed(
        {"name": _STRING, "mountPath": {"type": "string", "pattern": "^/"}, "readOnly": {}},
        "name",
        "mountPath",
    ),
}
_VOLUMES = {
    "type": "array",
    "items": {
        "oneOf": [
            _closed(
                {
                    "name": _STRING,
                    "persistentVolumeClaim": _closed({"claimName": _STRING}, "claimName"),
                },
                "name",
                "persistentVolumeClaim",
            ),
            _closed(
                {"name": _STRING, "emptyDir": _closed({"medium": {"enum": ["", "Memory"]}})},
                "name",
                "emptyDir",
            ),
            _closed(
                {"name": _STRING, "configMap": _closed({"name": _NAME}, "name")},
                "name",
                "configMap",
            ),
        ]
    },
}
_RESOURCES = {"type": "object", "additionalProperties": _QUANTITY}
_CONTAINER = _closed(
    {
        "name": _NAME,
        "image": _STRING,
        "command": _STRINGS,
        "args": _STRINGS,
        "env": _ENV,
        "securityContext": _closed({"runAsUser": {"type": "integer"}}),
        "resources": _closed({"requests": _RESOURCES, "limits": _RESOURCES}),
        "volumeMounts": _MOUNTS,
    },
    "name",
)


def _template(**more: Any) -> dict[str, Any]:
    return _closed(
        {
            "spec": _closed(
                {
                    "containers": {"type": "array", "items": _CONTAINER, "minItems": 1},
                    "volumes": _VOLUMES,
                    "securityContext": _closed({"fsGroup": {"type": "integer"}}),
                    **more,
                },
                "containers",
                *more,
            )
        },
        "spec",
    )


def _object(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _closed(
        {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": _METADATA,
            "spec": spec,
        },
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    )


_REPLICA = _closed(
    {
        "replicas": _LEAST_ONE,
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": _template(),
    },
    "template",
)
MPI_JOB = _object(
    "kubeflow.org/v2beta1",
    "MPIJob",
    _closed(
        {
            "slotsPerWorker": _LEAST_ONE,
            "runPolicy": _closed(
                {
                    "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
                    "backoffLimit": {"type": "integer", "minimum": 0},
                    "activeDeadlineSeconds": _LEAST_ONE,
                    "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
                }
            ),
            "sshAuthMountPath": _STRING,
            "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
            "mpiReplicaSpecs": _closed({"Launcher": _REPLICA, "Worker": _REPLICA}, "Launcher"),
        },
        "mpiReplicaSpecs",
    ),
)

_SPARK_POD = {
    "cores": _LEAST_ONE,
    "coreRequest": _QUANTITY,
    "coreLimit": _QUANTITY,
    "memory": _SPARK_MEMORY,
    "memoryOverhead": _SPARK_MEMORY,
    "env": _ENV,
    "volumeMounts": _MOUNTS,
    "serviceAccount": _STRING,
}
SPARK_APPLICATION = _object(
    "sparkoperator.k8s.io/v1beta2",
    "SparkApplication",
    _closed(
        {
            "type": {"enum": ["Java", "Python", "Scala", "R"]},
            "pythonVersion": {"enum": ["2", "3"]},
            "sparkVersion": _STRING,
            "mode": {"enum": ["cluster", "client"]},
            "image": _STRING,
            "mainApplicationFile": _STRING,
            "arguments": _STRINGS,
            "sparkConf": _STRING_MAP,
            "volumes": _VOLUMES,
            "restartPolicy": _closed({"type": {"enum": ["Never", "Always", "OnFailure"]}}),
            "driver": _closed(_SPARK_POD),
            "executor": _closed({**_SPARK_POD, "instances": _LEAST_ONE}),
        },
        "type",
        "sparkVersion",
        "mainApplicationFile",
        "driver",
        "executor",
    ),
)

JOB = _object(
    "batch/v1",
    "Job",
    _closed(
        {
            "backoffLimit": {"type": "integer", "minimum": 0},
            "activeDeadlineSeconds": _LEAST_ONE,
            "template": _template(restartPolicy={"enum": ["Never", "OnFailure"]}),
        },
        "template",
    ),
)

CONFIG_MAP = _closed(
    {
        "apiVersion": {"const": "v1"},
        "kind": {"const": "ConfigMap"},
        "metadata": _METADATA,
        "data": _STRING_MAP,
    },
    "apiVersion",
    "kind",
    "metadata",
    "data",
)

BY_KIND = {
    "MPIJob": MPI_JOB,
    "SparkApplication": SPARK_APPLICATION,
    "Job": JOB,
    "ConfigMap": CONFIG_MAP,
}
