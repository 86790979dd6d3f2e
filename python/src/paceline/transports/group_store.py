"""Named values that ranks of a group publish through a store (implements NodeShare of
`paceline.data`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from paceline.transports.store import store_barrier, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

    from paceline.data.node import NodeShare


@dataclass(slots=True)
class GroupStore:
    """Ranks 0 to ranks_on_node - 1 of one node. Names are visible to all objects with the same
    `prefix`.

    Each use needs an object with a prefix of its own.
    """

    store: Store
    local_rank: int
    ranks_on_node: int
    prefix: str = "node"
    _barriers: Iterator[int] = field(default_factory=count)

    def publish(self, name: str, value: str) -> None:
        self.store.set(f"{self.prefix}/{name}", value)

    def lookup(self, name: str, timeout_s: float) -> str:
        """Return the value published under `name`. Raises TimedOut after `timeout_s`."""
        key = f"{self.prefix}/{name}"
        wait_for(self.store, [key], timeout_s, f"rank {self.local_rank} of {self.prefix}: {name!r}")
        return bytes(self.store.get(key)).decode()

    def barrier(self, timeout_s: float) -> None:
        """Wait for all ranks of the node. Raises TimedOut naming the absent ranks."""
        name = f"{self.prefix}/barrier/{next(self._barriers)}"
        store_barrier(self.store, name, self.local_rank, range(self.ranks_on_node), timeout_s)


def gather(share: NodeShare, value: str, timeout_s: float) -> list[str]:
    """Return the values of all ranks of `share`, which is used for nothing else; collective.

    Raises TimedOut if a rank publishes none within `timeout_s`.
    """
    share.publish(str(share.local_rank), value)
    return [share.lookup(str(rank), timeout_s) for rank in range(share.ranks_on_node)]
