"""Transports: what carries gradients between ranks, by name.

A transport opens torch's default process group, so that DistributedDataParallel and every
`torch.distributed` call use it unchanged. Modules are loaded on demand: a Gloo run never loads MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from paceline.errors import UsageError
from paceline.transports.base import PeerLost, Transport

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.spec.values import Device

__all__ = ["PeerLost", "Transport", "create_transport", "transport_names"]

_MODULES = {
    "gloo": ("paceline.transports.gloo.transport", "GlooTransport"),
    "mpi": ("paceline.transports.mpi.transport", "MpiTransport"),
    "nccl": ("paceline.transports.nccl.transport", "NcclTransport"),
    "spark-allgather": ("paceline.transports.spark_allgather.transport", "SparkAllGatherTransport"),
}
_CARRIERS: dict[Device, tuple[str, ...]] = {"cpu": ("gloo", "mpi"), "cuda": ("nccl", "gloo")}
_IN_SPARK = "spark-allgather"  # between the tasks of a barrier stage


def transport_names(device: Device = "cpu") -> tuple[str, ...]:
    """Those that carry tensors which lie in the memory of `device`, whoever started the ranks."""
    return _CARRIERS[device]


def create_transport(trial: Trial) -> Transport | None:
    """The transport that `trial` asks for, not yet open.

    None where no process group is needed: for a single rank, and for ranks that share memory.
    """
    if trial.placement.ranks == 1 or trial.transport == "shared":
        return None
    names = transport_names(trial.device)
    if trial.transport not in names and (trial.transport, trial.device) != (_IN_SPARK, "cpu"):
        raise UsageError(
            f"transport {trial.transport!r} cannot carry gradients between "
            f"{trial.placement.ranks} ranks on device {trial.device}; use one of "
            f"{', '.join(names)}"
        )
    module, name = _MODULES[trial.transport]
    return cast("Transport", getattr(importlib.import_module(module), name)())
