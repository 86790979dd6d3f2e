"""The place of a rank among its peers, from the host of every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from paceline.errors import EnvironmentLacks
from paceline.host.processes import process_started_unix_s
from paceline.plan.rank_context import RankContext, StoreAddress


def rank_context(rank: int, hosts: Sequence[str], store: StoreAddress | None) -> RankContext:
    """Return the context of `rank`. Call it in the process of that rank.

    hosts: the host of every rank, by rank. store: the address where rank 0 listens.
    """
    host = hosts[rank]
    return RankContext(
        rank=rank,
        world_size=len(hosts),
        local_rank=list(hosts[:rank]).count(host),
        ranks_on_node=list(hosts).count(host),
        node_index=list(dict.fromkeys(hosts)).index(host),
        host=host,
        process_started_unix_s=own_start_unix_s(),
        store=store if len(hosts) > 1 else None,
    )


def nodes_of(hosts: Sequence[str], advice: str) -> list[str]:
    """Return the nodes in the order of their first ranks.

    Raises EnvironmentLacks, with `advice`, if the nodes have different numbers of ranks.
    """
    counts = {node: list(hosts).count(node) for node in dict.fromkeys(hosts)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{node}: {count}" for node, count in counts.items())
        raise EnvironmentLacks(f"expected as many ranks on every node, got {listed}; {advice}")
    return list(counts)


def own_start_unix_s() -> float:
    """Return when this process started."""
    return process_started_unix_s(os.getpid()) or time.time()
