"""Descriptors of the strategies on one node without much to plan, and a base class of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from paceline.spec.counts import divisors, number
from paceline.spec.descriptors import Exchange, KeyModel, OptionModel, StrategyDescriptor
from paceline.spec.placement import NodeCounts
from paceline.spec.values import Count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import Experiment, TrialRequest
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

    def exchange(self, options: Any) -> Exchange:
        return Exchange(among="nodes", overlaps=True)

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {}


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

    def exchange(self, options: Any) -> Exchange:
        return Exchange(among="nodes", overlaps=True)

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        yield {"threads_per_rank": cores}


class ThreadsKeys(KeyModel):
    """Keys of `threads`."""

    replicas: Count | None = Field(default=None, description="copies of the model on a node")


class ThreadsOptions(OptionModel):
    """Planned options of `threads`: the placement says everything."""

    def name_parts(self, placement: Placement) -> Iterator[str]:
        yield f"k{placement.replicas_per_rank}"


class Threads(StrategyDescriptor):
    """k replicas in k threads of one process."""

    name = "threads"
    summary = "one process, a replica of the model per thread"
    position = 30
    implementation = "paceline.strategies.threads.strategy:ThreadsStrategy"
    Keys = ThreadsKeys
    Options = ThreadsOptions
    is_replicated = True
    count_key = "replicas"
    layout_key_names = ("replicas",)
    without_cuda = (
        '"threads" has its replicas in one process, and GPUs need one process each; use '
        'local_strategy = "processes"'
    )

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank)
        replicas = number(request.keys(ThreadsKeys).replicas) or threads or max(2, cores)
        return NodeCounts(ranks=1, threads_per_rank=threads or replicas, replicas=replicas)

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        replicas = number(request.keys(ThreadsKeys).replicas)
        threads = number(request.threads_per_rank)
        if replicas == 1:
            yield (
                'replicas: "threads" needs at least 2, got 1; for one use '
                'local_strategy = "sequential"'
            )
        elif replicas is None and threads == 1:
            yield (
                'threads_per_rank: "threads" needs at least 2, one for each replica, got 1; use 2 '
                "or more"
            )
        elif replicas and threads and threads % replicas:
            yield (
                f"threads_per_rank: expected a multiple of the {replicas} replicas, got {threads}; "
                f"use {-(-threads // replicas) * replicas}"
            )

    def divides_updates(self, transport: str, options: Any) -> bool:
        return True

    def exchange(self, options: Any) -> Exchange:
        return Exchange(among="nodes", overlaps=False)

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {
            "replicas": placement.replicas_per_node,
            "threads_per_rank": placement.threads_per_rank,
        }

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for replicas in divisors(cores):
            yield {"replicas": replicas, "threads_per_rank": cores}


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


class Hogwild(ProcessPerReplica):
    """k processes with one copy of the weights."""

    name = "hogwild"
    summary = "processes of one node that update the same weights without locks"
    position = 80
    implementation = "paceline.strategies.hogwild:HogwildStrategy"
    Options = HogwildOptions
    is_candidate_for_best = False
    uses_node_memory = True
    without_cuda = (
        'local_strategy "hogwild" updates weights in the memory of CPUs; use local_strategy = '
        '"processes"'
    )

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

    def updates_by_part(self, options: Any) -> bool:
        return True
