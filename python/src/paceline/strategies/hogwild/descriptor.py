"""Descriptor of `hogwild`: processes of one node update the same weights without locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.counts import divisors, number
from paceline.spec.descriptors import OptionModel, StrategyDescriptor
from paceline.spec.placement import NodeCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import Experiment, TrialRequest
    from paceline.spec.placement import Placement


class HogwildOptions(OptionModel):
    """Planned options of `hogwild`."""

    @property
    def inexact_reason(self) -> str | None:
        return (
            "processes update shared weights without locks (not deterministic, not equivalent by "
            "design)"
        )

    @property
    def updates_within_step(self) -> bool:
        return True


class Hogwild(StrategyDescriptor):
    """k processes with one copy of the weights."""

    name = "hogwild"
    summary = "processes of one node that update the same weights without locks"
    position = 80
    implementation = "paceline.strategies.hogwild.strategy:HogwildStrategy"
    Options = HogwildOptions
    has_peers_on_node = True
    is_replicated = True
    is_candidate_for_best = False
    uses_node_memory = True
    count_key = "ranks_per_node"
    without_cuda = (
        'local_strategy "hogwild" updates weights in the memory of CPUs; use local_strategy = '
        '"processes"'
    )

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank) or 1
        ranks = number(request.ranks_per_node) or max(2, cores // threads)
        return NodeCounts(ranks=ranks, threads_per_rank=threads, replicas=ranks)

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        if request.nodes > 1:
            yield (
                f'nodes: "hogwild" shares the memory of one node, got {request.nodes}; use '
                'local_strategy = "parameter-server" with update_mode = "asynchronous"'
            )

    def options(
        self, request: TrialRequest, counts: NodeCounts, replica_batch: int, transport: str
    ) -> HogwildOptions:
        return HogwildOptions()

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {
            "ranks_per_node": placement.ranks_per_node,
            "threads_per_rank": placement.threads_per_rank,
        }

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for ranks in divisors(cores):
            yield {"ranks_per_node": ranks, "threads_per_rank": cores // ranks}
