"""What a transport must do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import PacelineError, RankFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.plan.trial import Trial
    from paceline.training.context import RankContext


class PeerLost(RankFailed):
    """A peer went away while this rank waited for it: the cause lies on another rank."""


class Transport(Protocol):
    """Carries tensors between ranks, as torch's default process group."""

    name: str

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        """Make the default process group; every later wait is limited by `limits.collective_s`.

        Raises EnvironmentLacks if this machine cannot, TimedOut if peers do not come.
        """

    def explain(self, error: Exception) -> PacelineError | None:
        """What an error out of a collective means: TimedOut, PeerLost, or None if unknown."""

    def describe(self) -> dict[str, Any]:
        """What a reader of the results should know of this transport (library, settings)."""

    def close(self, *, failed: bool) -> None:
        """Destroy the process group, harmless when called again.

        Collective unless `failed`, when the peers may be gone and nobody is waited for.
        """
