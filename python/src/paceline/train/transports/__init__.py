"""Transports: what carries gradients between ranks.

A transport opens torch's default process group, so that DistributedDataParallel and every
`torch.distributed` call use it unchanged. Its implementation is imported only in the ranks that
use it: a Gloo run never loads MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from paceline.base.errors import PacelineError
from paceline.measure.records.communication import TransportResult
from paceline.plan.spec.extensions import TRANSPORTS, load_object
from paceline.plan.trials.trial import RankContext, Trial

if TYPE_CHECKING:
    from paceline.collectives.torch_internals import Store


class Transport(Protocol):
    """Connects the ranks through torch's default process group."""

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        """Create the default process group. Every later wait is limited by `limits.collective_s`.

        Raises EnvironmentLacks if this machine cannot use the transport, TimedOut if peers do not
        connect.
        """

    def explain(self, error: Exception) -> PacelineError | None:
        """Translate an error of a collective to TimedOut or PeerLost; None if it is unknown."""

    def describe(self) -> TransportResult:
        """Return library and settings, for the records."""

    def close(self, *, failed: bool) -> None:
        """Destroy the process group; a second call does nothing.

        Collective unless `failed`: then peers may be gone, and no rank is waited for.
        """


def create_transport(trial: Trial) -> Transport | None:
    """Return the trial's transport, not yet open.

    None where no process group is needed: for a single rank, and for ranks that share memory.
    """
    descriptor = TRANSPORTS.get(trial.transport)
    if trial.placement.ranks == 1 or (descriptor.joins_ranks and not descriptor.spans_nodes):
        return None
    return cast("Transport", load_object(descriptor.implementation)())
