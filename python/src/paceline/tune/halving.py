"""Successive halving: measure the fastest candidates more often.

Synchronous successive halving (Jamieson, Talwalkar: Non-stochastic Best Arm Identification and
Hyperparameter Optimization, AISTATS 2016). All candidates of a rung are measured equally often, the
fastest go on to the next rung. The state follows from the measurements alone, so a search that is
resumed repeats the same decisions from the files in the run directory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SuccessiveHalving:
    """Rungs of candidates. The first candidate is the default: it goes on as long as it works."""

    def __init__(self, names: Sequence[str], *, keep: int, repeats: int) -> None:
        """keep: one in `keep` candidates goes on, and is measured `keep` times as often.

        repeats: measurements of each candidate that reaches the last rung.
        """
        self.alive = list(names)  # candidates of this rung, in their first order
        self.wanted = 1  # measurements of each of them in this rung
        self.finished = False
        self._default = names[0]
        self._keep = keep
        self._repeats = repeats
        self._speeds: dict[str, float] = {}

    @property
    def best(self) -> str | None:
        """The fastest candidate of the last rung; None if all failed."""
        return max(self._speeds, key=self._speeds.__getitem__, default=None)

    def report(self, speeds: Mapping[str, float]) -> None:
        """End the rung. A speed that is not finite means that the candidate failed."""
        self._speeds = {name: speeds[name] for name in self.alive if math.isfinite(speeds[name])}
        self.finished = not self._speeds or self.wanted * self._keep > self._repeats
        if self.finished:
            return
        ranked = sorted(self._speeds, key=self._speeds.__getitem__, reverse=True)
        going_on = {self._default, *ranked[: math.ceil(len(ranked) / self._keep)]}
        self.alive = [name for name in self._speeds if name in going_on]
        self.wanted *= self._keep
