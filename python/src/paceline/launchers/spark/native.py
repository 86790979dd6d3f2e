"""Additional configuration of Spark for the transports that Spark itself carries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.launchers.spark.descriptor import DEFAULT_DRIVER_MEMORY, SparkOptions
from paceline.spec.extensions import WORKLOADS

if TYPE_CHECKING:
    from paceline.plan.trial import Trial

_HEARTBEATS = 4  # in the limit of a collective
_LONGEST_HEARTBEAT_S = 10  # Spark's default
_TENSORS = 2  # a parameter's weight and momentum
# Copies of a task's result in the JVM: the record, its serialised form, and garbage. Two AlexNets
# of 456 MB each took 3.8 GiB of a heap of 4, of which 2.2 were in use.
_COPIES = 4
_MIB = 2**20
_JVM_MIB = 1024  # heap that Spark itself needs


def native_settings(trial: Trial) -> dict[str, str]:
    """Return the settings for transports `spark-allgather` and `spark-rounds`."""
    limit_s = math.ceil(trial.limits.collective_s)
    if trial.transport == "spark-allgather":
        # Our own limit on an operation must come first, because its message names the operation.
        slowest_s = max(limit_s, math.ceil(trial.limits.rendezvous_s))
        return {"spark.barrier.sync.timeout": str(2 * slowest_s)}
    if trial.transport == "spark-rounds":
        return {
            # A worker keeps the model and its samples from round to round.
            "spark.python.worker.reuse": "true",
            # The default refuses more than 1 GiB of results, the size of three AlexNets.
            "spark.driver.maxResultSize": "0",
            "spark.executor.memory": _heap(trial, trial.placement.ranks_per_node),
            # Compression hardly reduces floating-point weights.
            "spark.broadcast.compress": "false",
            "spark.shuffle.compress": "false",
            **liveness_settings(trial),
        }
    return {}


def liveness_settings(trial: Trial) -> dict[str, str]:
    """Return the limits after which driver and executor regard each other as lost.

    In rounds only Spark can notice a lost executor, so its limit is that of a collective. Ranks
    that communicate directly have that limit themselves and can name the missing rank: Spark waits
    twice as long.
    """
    limit_s = math.ceil(trial.limits.collective_s)
    heartbeat_s = max(1, min(_LONGEST_HEARTBEAT_S, limit_s // _HEARTBEATS))
    patience_s = max(limit_s if trial.transport == "spark-rounds" else 2 * limit_s, 2 * heartbeat_s)
    return {
        # The defaults are 120, 10 and 60 s.
        "spark.network.timeout": f"{patience_s}s",
        "spark.executor.heartbeatInterval": f"{heartbeat_s}s",
        "spark.network.timeoutInterval": f"{heartbeat_s}s",
        # After that an executor ends, and its tasks with it; the default is 60 beats, 10 minutes.
        "spark.executor.heartbeat.maxFailures": str(math.ceil(patience_s / heartbeat_s)),
    }


def driver_memory(trial: Trial) -> str:
    """Return the driver's heap: the spec's value, else the size of all ranks' weights."""
    asked = trial.options_as(SparkOptions).driver_memory
    if trial.transport != "spark-rounds" or asked != DEFAULT_DRIVER_MEMORY:
        return asked
    return _heap(trial, trial.placement.ranks)


def _heap(trial: Trial, tasks: int) -> str:
    """Return a heap that holds the results of so many tasks, as Spark writes sizes."""
    facts = WORKLOADS.get(trial.training.workload).facts()
    results_bytes = tasks * facts.parameter_bytes * _TENSORS * _COPIES
    return f"{_JVM_MIB + math.ceil(results_bytes / _MIB)}m"
