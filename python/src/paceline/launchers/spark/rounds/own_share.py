"""A schedule whose reader keeps the samples of one rank only.

The ranks of a node share decoded samples where they run side by side to the end. Spark's tasks do
not wait for each other, so each process decodes the samples of its own rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from paceline.plan.schedule import Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class OwnShare(Schedule):
    """A schedule with the same steps, whose `used_sample_ids` are those of one rank."""

    rank: int = 0
    world_size: int = 1

    def used_sample_ids(self) -> NDArray[np.int64]:
        """Return the sorted ids of the samples that the rank sees in any step, at least one.

        A feed cannot allocate memory of zero bytes.
        """
        seen = np.zeros(self.samples, dtype=bool)
        for step in range(self.steps):
            seen[self.step(step).share(self.rank, self.world_size)] = True
            if step % self.steps_per_epoch == 0 and seen.all():
                break  # later epochs add nothing
        seen[0] |= not seen.any()
        return np.flatnonzero(seen)


def own_share(schedule: Schedule, rank: int, world_size: int) -> OwnShare:
    """Return `schedule` as `rank` of `world_size` sees it."""
    values = {f.name: getattr(schedule, f.name) for f in fields(schedule) if f.init}
    return OwnShare(**values, rank=rank, world_size=world_size)
