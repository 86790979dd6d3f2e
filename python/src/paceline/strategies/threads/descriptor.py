"""Descriptor of `threads`: several replicas in one process, each in a thread of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from paceline.spec.counts import divisors, number
from paceline.spec.descriptors import KeyModel, OptionModel, StrategyDescriptor
from paceline.spec.placement import NodeCounts
from paceline.spec.values import Count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest
    from paceline.spec.placement import Placement


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

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {
            "replicas": placement.replicas_per_node,
            "threads_per_rank": placement.threads_per_rank,
        }

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for replicas in divisors(cores):
            yield {"replicas": replicas, "threads_per_rank": cores}
