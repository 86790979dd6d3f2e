"""Transports: what carries gradients between ranks.

A transport opens torch's default process group, so that DistributedDataParallel and every
`torch.distributed` call use it unchanged. Its implementation is imported only in the ranks that
use it: a Gloo run never loads MPI.
"""

from __future__ import annotations

from typing import cast

from paceline.errors import UsageError
from paceline.plan.trial import Trial
from paceline.spec.extensions import TRANSPORTS, load_object, quoted
from paceline.transports.base import Transport

__all__ = ["Transport", "create_transport"]


def create_transport(trial: Trial) -> Transport | None:
    """Return the trial's transport, not yet open.

    None where no process group is needed: for a single rank, and for ranks that share memory.
    """
    descriptor = TRANSPORTS.get(trial.transport)
    if trial.placement.ranks == 1 or (descriptor.joins_ranks and not descriptor.spans_nodes):
        return None
    able = tuple(
        each.name
        for each in TRANSPORTS.all()
        if each.opens_process_group and trial.device in each.devices
    )
    if trial.transport not in able:
        raise UsageError(
            f'transport: "{trial.transport}" cannot carry gradients between '
            f"{trial.placement.ranks} ranks on device {trial.device}; use {quoted(able)}"
        )
    return cast("Transport", load_object(descriptor.implementation)())
