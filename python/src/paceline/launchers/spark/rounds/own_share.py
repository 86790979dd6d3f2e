"""A schedule whose reader keeps one rank's photos only.

The ranks of a node share decoded photos where they run beside one another for good. Tasks of Spark
do not wait for each other, so each process decodes what its own rank sees.
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
    """The same steps as Schedule's; `used_sample_ids` are those of one rank."""

    rank: int = 0
    world_size: int = 1

    def used_sample_ids(self) -> NDArray[np.int64]:
        """Sorted ids of the samples that the rank sees in any step.

        At least one, since a feed takes no memory of no bytes.
        """
        seen = np.zeros(self.samples, dtype=bool)
        for step in range(self.steps):
            seen[self.step(step).share(self.rank, self.world_size)] = True
            if step % self.steps_per_epoch == 0 and seen.all():
                break  # shares of later epochs add nothing
        seen[0] |= not seen.any()
        return np.flatnonzero(seen)


def own_share(schedule: Schedule, rank: int, world_size: int) -> OwnShare:
    """`schedule` as `rank` of `world_size` sees it."""
    values = {f.name: getattr(schedule, f.name) for f in fields(schedule) if f.init}
    return OwnShare(**values, rank=rank, world_size=world_size)
