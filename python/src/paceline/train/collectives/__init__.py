"""Transports: what carries gradients between ranks, by name.

A transport opens torch's default process group, so that DistributedDataParallel and every
`torch.distributed` call use it unchanged. Modules are loaded on demand: a Gloo run never loads MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from paceline.errors import UsageError
from paceline.train.collectives.base import PeerLost, Transport

if TYPE_CHECKING:
    from paceline.plan.trial import Trial

__all__ = ["PeerLost", "Transport", "create_transport", "transport_names"]

_MODULES = {
    "gloo": ("paceline.train.collectives.gloo", "GlooTransport"),
    "mpi": ("paceline.train.collectives.mpi", "MpiTransport"),
}


def transport_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def create_transport(trial: Trial) -> Transport | None:
    """The transport that `trial` asks for, not yet open; None for a single rank."""
    if trial.placement.ranks == 1:
        return None
    if trial.transport not in _MODULES:
        raise UsageError(
            f"transport {trial.transport!r} cannot carry gradients between "
            f"{trial.placement.ranks} ranks; use one of {', '.join(_MODULES)}"
        )
    module, name = _MODULES[trial.transport]
    return cast("Transport", getattr(importlib.import_module(module), name)())
