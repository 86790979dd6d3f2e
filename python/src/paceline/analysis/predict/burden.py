"""The addition of the exchange with other nodes to a node's own step.

A rank that sends shares its cores with the kernel, with the threads of the transport and with the
sums, so its own step is longer than that of a node alone, without any waiting. One trial on several
nodes shows by how much. The addition has three parts:

products: of factors of other nodes' samples. They grow with the share of other nodes.
transfer: at most half of the time in which messages were under way, because a core is shared fairly
    by two threads. On another link it lies between two bounds: proportional to the bytes that move
    during the node's own work, and proportional to the time in which they move.
rest: copies and bookkeeping. It is proportional to the node's own step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.analysis.predict.overlap import Replay

_LEAST_RATIO = 0.01  # of a transfer that vanishes: its logarithm is needed
_FAIR_SHARE = 0.5  # of a core, for one of two threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Burden:
    """The addition in one trial on several nodes.

    own_s: step of a node alone with as many samples. added_s: by how much the trial's own step is
    longer. others: share of the samples that other nodes have. active_s, moved_bytes: of the
    trial's own step, as `Replay.beside_own` returns them.
    """

    own_s: float
    added_s: float
    others: float
    active_s: float
    moved_bytes: float

    @property
    def ratio(self) -> float:
        """Ratio of the trial's own step to that of a node alone."""
        return 1 + self.added_s / self.own_s

    def seconds(
        self,
        own_s: NDArray[np.float64],
        replay: Replay,
        generator: np.random.Generator,
    ) -> NDArray[np.float64]:
        """Draw the addition to other steps, shape (draws, nodes).

        own_s: of a node alone, shape (draws, nodes). replay: of the trial's messages, on the link
        of these steps. Values between the bounds of the transfer are equally likely on a
        logarithmic scale.
        """
        profile, nodes = replay.profile, replay.nodes
        products_s = min(self.added_s, profile.products_s * self.others)
        transfer_s = min(self.added_s - products_s, _FAIR_SHARE * self.active_s)
        rest_s = self.added_s - products_s - transfer_s
        found: NDArray[np.float64] = (
            products_s * (1 - 1 / nodes) / self.others * profile.growth(nodes * replay.samples)
            + transfer_s * self._transfer_ratio(replay, generator)
            + rest_s * own_s / self.own_s
        )
        return np.where(nodes > 1, found, 0.0)

    def _transfer_ratio(
        self, replay: Replay, generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """Draw between both bounds, shape (draws, nodes)."""
        active_s, moved_bytes = replay.beside_own()
        if not self.active_s:
            return np.ones_like(active_s)
        bounds = np.stack([moved_bytes / self.moved_bytes, active_s / self.active_s])
        low, high = np.sort(np.log(np.maximum(bounds, _LEAST_RATIO)), axis=0)
        ratio: NDArray[np.float64] = np.exp(low + (high - low) * generator.random((len(low), 1)))
        return ratio
