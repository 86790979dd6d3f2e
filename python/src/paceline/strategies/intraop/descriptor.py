"""Descriptor of `intraop`: one replica, each operation on several threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.counts import number
from paceline.spec.descriptors import StrategyDescriptor
from paceline.spec.placement import NodeCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest


class Intraop(StrategyDescriptor):
    """One replica per node on all of its cores."""

    name = "intraop"
    summary = "one process, the framework's own threads"
    position = 20
    implementation = "paceline.strategies.replica:ReplicaStrategy"
    count_key = "threads_per_rank"
    runs_scripts = True
    without_cuda = (
        '"intraop" uses threads of the CPU, expected "cpu", got "cuda"; use local_strategy = '
        '"sequential" for one GPU'
    )

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        return NodeCounts(ranks=1, threads_per_rank=number(request.threads_per_rank) or cores)

    def reduces_in_buckets(self, request: TrialRequest) -> bool:
        return request.nodes > 1

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        yield {"threads_per_rank": cores}
