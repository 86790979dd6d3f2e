"""What one [[trials]] entry may say about how gradients travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest

# Transports that torch.distributed calls one by one: what is sent can be compressed, and counted.
CARRIERS = ("gloo", "mpi", "nccl", "spark-allgather")
SPARK_NATIVE = ("spark-rounds", "spark-allgather")
# key -> the compression that it is a setting of
_SETTING_OF = {"compression_rank": "powersgd", "compression_density": "topk"}


def communication_faults(trial: TrialRequest) -> Iterator[str]:
    """Faults of algorithm, compression, averaging and messages."""
    yield from _spark_faults(trial)
    yield from _algorithm_faults(trial)
    yield from _compression_faults(trial)
    yield from _averaging_faults(trial)
    for key in ("bucket_mb", "buckets_in_flight"):
        if getattr(trial, key) is not None and not in_buckets(trial):
            yield (
                f"{key}: is about buckets of gradients reduced one by one, expected "
                'local_strategy = "processes" with transport = "gloo", "mpi" or "nccl", and '
                'reduction = "flat" on several nodes; leave it out'
            )
    if trial.mpi_parameters and trial.launcher != "mpi":
        yield (
            'mpi_parameters: are for mpirun, expected launcher = "mpi", got '
            f'"{trial.launcher}"; leave them out'
        )


def carrier(trial: TrialRequest) -> str | None:
    """The transport between ranks that the entry means, as far as the spec says."""
    if trial.transport is not None or trial.nodes == 1:
        return trial.transport
    if trial.device == "cuda":
        return "nccl" if trial.local_strategy == "processes" else "gloo"
    return "mpi" if trial.launcher == "mpi" else "gloo"


def is_flat(trial: TrialRequest) -> bool:
    """Whether every rank reduces with every other, rather than node by node."""
    if trial.local_strategy != "processes":
        return False
    return (
        trial.nodes == 1
        or trial.reduction == "flat"
        or trial.averaging_period is not None
        or trial.transport in SPARK_NATIVE
        or (trial.device == "cuda" and trial.reduction is None)
    )


def in_buckets(trial: TrialRequest) -> bool:
    """Whether gradients are reduced bucket by bucket while the backward pass runs."""
    one_rank_a_node = trial.local_strategy in ("sequential", "intraop") and trial.nodes > 1
    return (
        carrier(trial) in CARRIERS
        and (is_flat(trial) or one_rank_a_node)
        and trial.averaging_period is None
    )


def _spark_faults(trial: TrialRequest) -> Iterator[str]:
    if trial.transport not in SPARK_NATIVE:
        return
    name = trial.transport
    if trial.launcher != "spark":
        yield f'transport: "{name}" needs launcher = "spark", got "{trial.launcher}"'
    if trial.local_strategy != "processes":
        yield (
            f'transport: "{name}" joins one-replica tasks, expected local_strategy = "processes", '
            f'got "{trial.local_strategy}"'
        )
    if trial.device != "cpu":
        yield f'transport: "{name}" carries the memory of CPUs, expected device = "cpu"'
    if trial.reduction == "hierarchical":
        yield f'reduction: "{name}" reduces in one go, expected "flat" or nothing'
    if name == "spark-rounds" and trial.averaging_start:
        yield "averaging_start: rounds of Spark average weights from the first one; leave it out"


def _algorithm_faults(trial: TrialRequest) -> Iterator[str]:
    if trial.algorithm is None:
        return
    if carrier(trial) != "mpi":
        yield (
            'algorithm: is a choice of transport = "mpi", got '
            f'"{carrier(trial) or "shared"}"; leave it out, or set the transport'
        )


def _compression_faults(trial: TrialRequest) -> Iterator[str]:
    for key, method in _SETTING_OF.items():
        if getattr(trial, key) is not None and trial.compression != method:
            yield f'{key}: is a setting of compression = "{method}"; leave it out'
    if trial.compression is None:
        return
    if carrier(trial) not in CARRIERS:
        yield (
            "compression: makes less to send, expected a transport that sends (gloo, mpi, nccl, "
            f'spark-allgather), got "{carrier(trial) or "none or shared"}"'
        )
    if trial.averaging_period is not None:
        yield "compression: is of gradients, with averaging_period weights travel; use one of both"


def _averaging_faults(trial: TrialRequest) -> Iterator[str]:
    if trial.averaging_period is None:
        if trial.averaging_start is not None:
            yield "averaging_start: says when averaging_period begins to count; set that, too"
        return
    if trial.local_strategy != "processes" or trial.reduction == "hierarchical":
        yield (
            "averaging_period: local SGD has one replica a process, expected local_strategy = "
            '"processes", and not reduction = "hierarchical"'
        )
    if trial.transport != "spark-rounds" and carrier(trial) not in CARRIERS:
        yield (
            "averaging_period: expected a transport that averages weights (gloo, mpi, nccl, "
            f'spark-allgather, spark-rounds), got "{carrier(trial) or "shared"}"'
        )
