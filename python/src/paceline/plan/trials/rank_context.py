"""A rank and its peers as plain values: all that the training knows about its launcher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Address of the TCP key-value store that rank 0 serves.

    listen_fd is rank 0's socket, already bound to `host` and listening. So the store listens on
    that address only (given only a host, TCPStore listens on every interface:
    pytorch/pytorch#173909), and the port cannot be taken between its choice and its use.
    """

    host: str
    port: int
    listen_fd: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's position among its peers."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this node, from 0
    ranks_on_node: int
    node_index: int
    host: str  # host name of this node, unique among the nodes
    process_started_unix_s: float
    store: StoreAddress | None = None  # None only for a single rank

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes the files that are written once per trial."""
        return self.rank == 0
