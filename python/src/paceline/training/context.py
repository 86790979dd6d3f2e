"""Rank and peers as values: all that the training knows of how it was started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the ranks meet: a TCP key-value store that rank 0 serves.

    listen_fd is rank 0's socket, already bound and listening on `host` alone, so that the store
    listens nowhere else (given only a host, TCPStore listens on every interface:
    pytorch/pytorch#173909) and no port is lost between choosing and using it.
    """

    host: str
    port: int
    listen_fd: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's place among its peers."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this node, from 0
    ranks_on_node: int
    node_index: int
    host: str  # name of this node, unique among the nodes
    process_started_unix_s: float
    store: StoreAddress | None = None  # None only for a single rank

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once for the whole trial."""
        return self.rank == 0
