"""Interface of a transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import PacelineError, RankFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial


class PeerLost(RankFailed):
    """A peer ended while this rank waited for it: the cause is on another rank."""


class Transport(Protocol):
    """Connects the ranks through torch's default process group."""

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        """Create the default process group. Every later wait is limited by `limits.collective_s`.

        Raises EnvironmentLacks if this machine cannot use the transport, TimedOut if peers do not
        connect.
        """

    def explain(self, error: Exception) -> PacelineError | None:
        """Translate an error of a collective to TimedOut or PeerLost; None if it is unknown."""

    def describe(self) -> dict[str, Any]:
        """Return library and settings, for the records."""

    def close(self, *, failed: bool) -> None:
        """Destroy the process group; a second call does nothing.

        Collective unless `failed`: then peers may be gone, and no rank is waited for.
        """
