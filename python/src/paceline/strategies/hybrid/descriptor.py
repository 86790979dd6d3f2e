"""Descriptor of `hybrid`: several replicas, each split into pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from paceline.spec.counts import number
from paceline.spec.placement import NodeCounts
from paceline.spec.values import Count
from paceline.strategies.pipeline import settings
from paceline.strategies.pipeline.descriptor import Pipeline
from paceline.strategies.pipeline.settings import PipelineKeys, stages_given

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest
    from paceline.spec.placement import Placement
    from paceline.strategies.pipeline.settings import PipelineOptions

DEFAULT_STAGES = 2
_DOT, _TIMES = "\N{MIDDLE DOT}", "\N{MULTIPLICATION SIGN}"


class HybridKeys(PipelineKeys):
    """Keys of `hybrid`."""

    replicas: Count | None = Field(default=None, description="pipelines on a node")


class Hybrid(Pipeline):
    """k pipelines of s stages in k * s processes; what is not here is as in a single pipeline."""

    name = "hybrid"
    summary = "several replicas of the model, each split into stages"
    position = 60
    Keys = HybridKeys
    is_replicated = True
    count_key = "replicas"
    layout_key_names = tuple(HybridKeys.model_fields)

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank) or 1
        ranks = number(request.ranks_per_node)
        replicas = number(request.keys(HybridKeys).replicas)
        stages = stages_given(request)
        if stages is None:
            stages = ranks // replicas if ranks and replicas else DEFAULT_STAGES
        if replicas is None:
            replicas = ranks // stages if ranks else max(2, cores // (stages * threads))
        return NodeCounts(
            ranks=replicas * stages, threads_per_rank=threads, replicas=replicas, stages=stages
        )

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        replicas, stages = number(request.keys(HybridKeys).replicas), stages_given(request)
        ranks = number(request.ranks_per_node)
        if replicas == 1:
            yield (
                'replicas: "hybrid" needs at least 2, got 1; for one use local_strategy = '
                '"pipeline"'
            )
        if stages == 1:
            yield (
                'stages: "hybrid" needs at least 2, got 1; for one use local_strategy = "processes"'
            )
        if ranks and replicas != 1 and stages != 1:
            yield from _rank_faults(ranks, replicas, stages)

    def layout(self, placement: Placement, options: PipelineOptions) -> str:
        workers = f"{placement.replicas_per_node}{_DOT}{placement.stages}"
        return f"{workers}{_TIMES}{placement.threads_per_worker} m{options.micro_batches}"

    def layout_keys(self, placement: Placement, options: PipelineOptions) -> dict[str, Any]:
        return {
            "replicas": placement.replicas_per_node,
            **super().layout_keys(placement, options),
        }

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for replicas, stages, threads in searched_layouts(cores):
            layout = {"replicas": replicas, "stages": stages, "threads_per_rank": threads}
            for chosen in settings.searched_settings(stages, batch // replicas):
                yield {**layout, **chosen}


def searched_layouts(cores: int) -> list[tuple[int, int, int]]:
    """Return (replicas, stages, threads) that use the most cores.

    Two replicas of two stages are the smallest hybrid; fewer than four cores are oversubscribed.
    """
    if cores < 4:
        return [(2, 2, 1)]
    most_stages = min(cores // 2, settings.MOST_STAGES)
    pairs = [
        (replicas, stages)
        for replicas in range(2, cores // 2 + 1)
        for stages in range(2, most_stages + 1)
        if replicas * stages <= cores
    ]
    layouts = [(replicas, stages, cores // (replicas * stages)) for replicas, stages in pairs]
    used = max(replicas * stages * threads for replicas, stages, threads in layouts)
    return [layout for layout in layouts if layout[0] * layout[1] * layout[2] == used]


def _rank_faults(ranks: int, replicas: int | None, stages: int | None) -> Iterator[str]:
    if replicas and stages:
        if ranks != replicas * stages:
            yield (
                f"ranks_per_node: expected replicas x stages = {replicas * stages}, got {ranks}; "
                "remove one of the three"
            )
        return
    parts, name = (replicas, "replicas") if replicas else (stages or DEFAULT_STAGES, "stages")
    if ranks % parts or ranks < 2 * parts:
        yield (
            f"ranks_per_node: expected a multiple of the {parts} {name}, at least {2 * parts}, "
            f"got {ranks}"
        )
