"""Descriptors of `pipeline`, one replica that is split into stages, and `hybrid`, several ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from paceline.spec.counts import number
from paceline.spec.descriptors import Exchange, StrategyDescriptor
from paceline.spec.placement import NodeCounts
from paceline.spec.values import Count
from paceline.strategies.pipeline import settings
from paceline.strategies.pipeline.settings import PipelineKeys, PipelineOptions, stages_given

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.descriptors import WorkloadDescriptor
    from paceline.spec.models import Experiment, TrialRequest
    from paceline.spec.placement import Placement

DEFAULT_STAGES = 2  # of each replica
_DOT, _TIMES = "\N{MIDDLE DOT}", "\N{MULTIPLICATION SIGN}"


class Pipeline(StrategyDescriptor):
    """s stages in s processes."""

    name = "pipeline"
    summary = "the model split into stages, a process per stage"
    position = 50
    implementation = "paceline.strategies.pipeline.strategy:PipelineStrategy"
    Keys = PipelineKeys
    Options = PipelineOptions
    has_peers_on_node = True
    is_pipelined = True
    uses_node_memory = True
    count_key = "stages"
    layout_key_names = tuple(PipelineKeys.model_fields)

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank) or 1
        given = stages_given(request) or number(request.ranks_per_node)
        stages = given or max(2, cores // threads)
        return NodeCounts(ranks=stages, threads_per_rank=threads, stages=stages)

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        ranks, stages = number(request.ranks_per_node), stages_given(request)
        if stages == 1:
            yield (
                'stages: "pipeline" needs at least 2, got 1; for one use '
                'local_strategy = "sequential"'
            )
        elif ranks and stages and ranks != stages:
            yield (
                f"ranks_per_node: each stage is one, expected {stages}, got {ranks}; remove it, or "
                'use local_strategy = "hybrid" for several replicas'
            )

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        yield from settings.split_faults(request)

    def batch_faults(
        self,
        request: TrialRequest,
        counts: NodeCounts,
        replica_batch: int,
        workload: WorkloadDescriptor,
    ) -> Iterator[str]:
        """Yield why the batch has too few samples, or the model too few layers."""
        keys = request.keys(PipelineKeys)
        micro_batches = number(keys.micro_batches)
        if micro_batches is not None and micro_batches > replica_batch:
            yield (
                f"micro_batches: a replica's share of a batch is {replica_batch} sample(s), "
                f'expected at most as many, got {micro_batches}; use {replica_batch}, "auto", or '
                "a larger global_batch"
            )
        planned = self.options(request, counts, replica_batch, "").micro_batches
        yield from settings.stream_faults(request, planned, counts)
        # Two stages need one split point, and every model has one; the strategy checks it again.
        # The model's facts take 1 to 2 s, so ask for them only where the answer is open.
        if counts.stages > 2 or keys.split_points is not None:
            places = workload.facts().split_points
            yield from settings.model_faults(
                workload.model, places, counts.stages, keys.split_points
            )

    def task_faults(
        self,
        workload: WorkloadDescriptor,
        placement: Placement,
        options: PipelineOptions,
        *,
        activation_checkpointing: bool,
    ) -> Iterator[str]:
        if options.flushes:
            return
        if activation_checkpointing:
            yield settings.STREAM_STORES_ACTIVATIONS
        if workload.needs_facts:
            yield from settings.stream_model_faults(
                workload.facts(), workload.model, placement.stages, options
            )

    def options(
        self, request: TrialRequest, counts: NodeCounts, replica_batch: int, transport: str
    ) -> PipelineOptions:
        keys = request.keys(PipelineKeys)
        usual = min(settings.DEFAULT_MICRO_BATCHES_PER_STAGE * counts.stages, replica_batch)
        return PipelineOptions(
            micro_batches=number(keys.micro_batches) or usual,
            schedule=keys.schedule or "1f1b",
            balance=None if keys.split_points is not None else keys.balance or "time",
            split_points=keys.split_points,
            vertical_sync=bool(keys.vertical_sync),
        )

    def implementation_for(self, transport: str, options: PipelineOptions) -> str:
        if options.flushes:
            return self.implementation
        return "paceline.strategies.pipeline.pipedream_strategy:PipeDreamStrategy"

    def undivided(self, request: TrialRequest, options: PipelineOptions) -> PipelineOptions:
        if number(request.keys(PipelineKeys).micro_batches) is not None:
            return options
        return options.model_copy(update={"micro_batches": 1})

    def layout(self, placement: Placement, options: PipelineOptions) -> str:
        return f"{super().layout(placement, options)} m{options.micro_batches}"

    def divides_updates(self, transport: str, options: Any) -> bool:
        return True

    def exchange(self, options: PipelineOptions) -> Exchange:
        return Exchange(among="stages", overlaps=False)

    def updates_by_part(self, options: PipelineOptions) -> bool:
        return not options.flushes

    def layout_keys(self, placement: Placement, options: PipelineOptions) -> dict[str, Any]:
        if options.split_points is None:
            split: dict[str, Any] = {"balance": options.balance}
        else:
            split = {"split_points": options.split_points}
        if options.vertical_sync:
            split["vertical_sync"] = True
        return {
            "stages": placement.stages,
            "threads_per_rank": placement.threads_per_rank,
            "micro_batches": options.micro_batches,
            "schedule": options.schedule,
            **split,
        }

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for stages in range(2, min(cores, settings.MOST_STAGES) + 1):
            layout = {"stages": stages, "threads_per_rank": cores // stages}
            for chosen in settings.searched_settings(stages, batch):
                yield {**layout, **chosen}


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
