"""What Spark is told besides for transports of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.spec.models import SparkSettings

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.spec.workloads import ModelName

_HEARTBEATS = 4  # in the limit of a collective
_LONGEST_HEARTBEAT_S = 10  # Spark's default
# Large enough for heaps; the exact numbers are the models' own.
_PARAMETERS: dict[ModelName, float] = {"alexnet": 57e6, "vgg16": 134.3e6}
_PARAMETER_BYTES = 8  # weight and momentum
# Of a task's result in the JVM: the record, its serialised form, what a collection leaves. Two
# AlexNets' 456 MB each took 3.8 GiB of a heap of 4, of which 2.2 were alive.
_COPIES = 4
_GIB = 2**30


def native_settings(trial: Trial) -> dict[str, str]:
    """Settings of `spark-allgather` and `spark-rounds`, over those of every Spark trial."""
    limit_s = math.ceil(trial.limits.collective_s)
    if trial.transport == "spark-allgather":
        # Our own limit on an operation has to speak first: it knows its name.
        slowest_s = max(limit_s, math.ceil(trial.limits.rendezvous_s))
        return {"spark.barrier.sync.timeout": str(2 * slowest_s)}
    if trial.transport == "spark-rounds":
        return {
            # A worker keeps the model and its photos from round to round.
            "spark.python.worker.reuse": "true",
            # The default refuses more than 1 GiB of results: what three AlexNets come to.
            "spark.driver.maxResultSize": "0",
            "spark.executor.memory": f"{_heap_gib(trial, trial.placement.ranks_per_node)}g",
            # Floats of weights hardly get smaller by it.
            "spark.broadcast.compress": "false",
            "spark.shuffle.compress": "false",
            **liveness_settings(trial),
        }
    return {}


def liveness_settings(trial: Trial) -> dict[str, str]:
    """When a driver and an executor that cannot reach one another give each other up.

    In rounds only they can notice it, so after the limit of an exchange. Ranks that talk to one
    another have that limit themselves, and then know who is missing: Spark waits twice as long.
    """
    limit_s = math.ceil(trial.limits.collective_s)
    heartbeat_s = max(1, min(_LONGEST_HEARTBEAT_S, limit_s // _HEARTBEATS))
    patience_s = max(limit_s if trial.transport == "spark-rounds" else 2 * limit_s, 2 * heartbeat_s)
    return {
        # The defaults are 120, 10 and 60 s.
        "spark.network.timeout": f"{patience_s}s",
        "spark.executor.heartbeatInterval": f"{heartbeat_s}s",
        "spark.network.timeoutInterval": f"{heartbeat_s}s",
        # Then an executor ends, and its tasks with it; the default is 60 beats, 10 minutes.
        "spark.executor.heartbeat.maxFailures": str(math.ceil(patience_s / heartbeat_s)),
    }


def driver_memory(trial: Trial) -> str:
    """The driver's heap: as the spec says, or where it is silent, what all ranks' weights take."""
    asked = trial.spark.driver_memory
    if trial.transport != "spark-rounds" or asked != SparkSettings().driver_memory:
        return asked
    return f"{_heap_gib(trial, trial.placement.ranks)}g"


def _heap_gib(trial: Trial, tasks: int) -> int:
    weights_bytes = _PARAMETERS.get(trial.training.model, 0) * _PARAMETER_BYTES
    return 1 + math.ceil(tasks * weights_bytes * _COPIES / _GIB)
