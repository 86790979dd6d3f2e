"""Descriptor of `sequential`: one process with one thread, or one GPU; the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.descriptors import StrategyDescriptor
from paceline.spec.placement import NodeCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest
    from paceline.spec.placement import Placement


class Sequential(StrategyDescriptor):
    """One replica per node, one thread each."""

    name = "sequential"
    summary = "one process, one thread"
    position = 10
    implementation = "paceline.strategies.replica:ReplicaStrategy"
    runs_scripts = True

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        return NodeCounts(ranks=1, threads_per_rank=1)

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        if request.threads_per_rank not in (1, "auto"):
            yield (
                f'threads_per_rank: "sequential" has one thread, got {request.threads_per_rank}; '
                'use local_strategy = "intraop" for the threads of the framework'
            )

    def reduces_in_buckets(self, request: TrialRequest) -> bool:
        return request.nodes > 1

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {}
