"""Common part of the descriptors of strategies that have one replica in each process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.counts import divisors, number
from paceline.spec.descriptors import StrategyDescriptor
from paceline.spec.placement import NodeCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest
    from paceline.spec.placement import Placement


class ProcessPerReplica(StrategyDescriptor):
    """k processes on a node with one replica each; at least two unless the request says one."""

    has_peers_on_node = True
    is_replicated = True
    count_key = "ranks_per_node"

    def requested_ranks(self, request: TrialRequest) -> int | None:
        """Return the number of processes on a node that the request gives; None if open."""
        return number(request.ranks_per_node)

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank) or 1
        ranks = self.requested_ranks(request) or max(2, cores // threads)
        return NodeCounts(ranks=ranks, threads_per_rank=threads, replicas=ranks)

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {
            "ranks_per_node": placement.ranks_per_node,
            "threads_per_rank": placement.threads_per_rank,
        }

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for ranks in divisors(cores):
            yield {"ranks_per_node": ranks, "threads_per_rank": cores // ranks}
