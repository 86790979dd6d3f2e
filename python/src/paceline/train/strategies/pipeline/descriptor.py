"""Descriptors of `pipeline`, one replica that is split into stages, and `hybrid`, several ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field

from paceline.plan.spec.descriptors import (
    KeyModel,
    OptionModel,
    StrategyDescriptor,
    WorkloadDescriptor,
)
from paceline.plan.spec.model_facts import ModelFacts
from paceline.plan.spec.models import Experiment, TrialRequest
from paceline.plan.spec.placement import NodeCounts, Placement, number
from paceline.plan.spec.reduction import StepReduction
from paceline.plan.spec.values import Count, PositiveInt
from paceline.train.strategies.descriptors import needs_two

DEFAULT_STAGES = 2  # of each replica
_DOT, _TIMES = "\N{MIDDLE DOT}", "\N{MULTIPLICATION SIGN}"
PipelineSchedule = Literal["gpipe", "1f1b", "pipedream"]
# Those that update the weights once a step, after all micro-batches, and train the same.
FLUSHING_SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b")
Balance = Literal["time", "size"]  # what the stages share equally
# First layer of each stage but the first.
SplitPoints = Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)]

_STREAM_STORES_ACTIVATIONS = (
    'activation_checkpointing: schedule "pipedream" stores the activations of every micro-batch in '
    'flight; remove it, or use schedule = "1f1b"'
)

# Keeps the bubble (s - 1) / (m + s - 1) under a fifth (Huang et al., GPipe, section 2.3:
# negligible from four micro-batches a stage on).
DEFAULT_MICRO_BATCHES_PER_STAGE = 4
MOST_STAGES = 8  # in a search
# Micro-batches a stage that a search tries: one leaves half of the time to the bubble, eight about
# a tenth; more make the micro-batches too small for a core to work on well.
_SEARCHED_MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8)


class PipelineKeys(KeyModel):
    """Keys of `pipeline`."""

    stages: Count | None = None  # of a replica
    micro_batches: Count | None = None  # of a replica's samples
    schedule: PipelineSchedule | None = None
    vertical_sync: bool | None = None  # pipedream: a micro-batch uses one version of the weights
    balance: Balance | None = None
    split_points: SplitPoints | None = None


class PipelineOptions(OptionModel):
    """Planned options of a model in stages, one rank each."""

    micro_batches: PositiveInt  # of a replica's share of a batch
    schedule: PipelineSchedule = "1f1b"
    balance: Balance | None = "time"  # None: split_points are given
    split_points: tuple[int, ...] | None = None
    vertical_sync: bool = False  # of pipedream

    @property
    def flushes(self) -> bool:
        """Return whether all micro-batches of a step end before the weights change."""
        return self.schedule in FLUSHING_SCHEDULES

    @property
    def inexact_reason(self) -> str | None:
        if self.flushes:
            return None
        return "stages update stale weights after each micro-batch (not equivalent by design)"

    def exact_form(self) -> Self:
        if self.flushes:
            return self
        return self.model_copy(update={"schedule": "1f1b", "vertical_sync": False})

    def name_parts(self, placement: Placement) -> Iterator[str]:
        points = "".join(f"c{point}" for point in self.split_points or ())
        yield f"s{placement.stages}m{self.micro_batches}-{self.schedule}-{points or self.balance}"
        if self.vertical_sync:
            yield "vertical"

    def labels(self) -> Iterator[str]:
        if not self.flushes:
            yield self.schedule
        if self.vertical_sync:
            yield "vertical sync"

    def details(self) -> Iterator[str]:
        if self.flushes:
            yield self.schedule
        if self.split_points is None:
            yield str(self.balance)
        else:
            yield f"split at {', '.join(map(str, self.split_points))}"


class Pipeline(StrategyDescriptor):
    """s stages in s processes."""

    name = "pipeline"
    summary = "the model split into stages, a process per stage"
    position = 50
    implementation = "paceline.train.strategies.pipeline.strategy:PipelineStrategy"
    Keys = PipelineKeys
    Options = PipelineOptions
    has_peers_on_node = True
    uses_node_memory = True
    count_key = "stages"
    layout_key_names = tuple(PipelineKeys.model_fields)

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank) or 1
        given = _stages_given(request) or number(request.ranks_per_node)
        stages = given or max(2, cores // threads)
        return NodeCounts(ranks=stages, threads_per_rank=threads, stages=stages)

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        ranks, stages = number(request.ranks_per_node), _stages_given(request)
        if stages == 1:
            yield needs_two("stages", self.name, instead="sequential")
        elif ranks and stages and ranks != stages:
            yield (
                f"ranks_per_node: each stage is one, expected {stages}, got {ranks}; remove it, or "
                'use local_strategy = "hybrid" for several replicas'
            )

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        """Yield contradictions between split points, stages and balance."""
        keys = request.keys(PipelineKeys)
        points, stages = keys.split_points, number(keys.stages)
        if points is None:
            return
        if keys.balance is not None:
            yield f'balance: split_points are given; remove balance = "{keys.balance}"'
        if any(low >= high for low, high in pairwise(points)):
            yield f"split_points: expected layers in ascending order, each once, got {list(points)}"
        if stages is not None and stages != len(points) + 1:
            yield (
                f"split_points: {stages} stages have {stages - 1}, got {len(points)}; use "
                f"stages = {len(points) + 1} or remove it"
            )

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
        yield from _stream_faults(request, planned, counts)
        # Two stages need one split point, and every model has one; the strategy checks it again.
        # The model's facts take 1 to 2 s, so ask for them only where the answer is open.
        if counts.stages > 2 or keys.split_points is not None:
            places = workload.facts().split_points
            yield from model_faults(workload.model, places, counts.stages, keys.split_points)

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
            yield _STREAM_STORES_ACTIVATIONS
        if workload.needs_facts:
            yield from _stream_model_faults(
                workload.facts(), workload.model, placement.stages, options
            )

    def options(
        self, request: TrialRequest, counts: NodeCounts, replica_batch: int, transport: str
    ) -> PipelineOptions:
        keys = request.keys(PipelineKeys)
        usual = min(DEFAULT_MICRO_BATCHES_PER_STAGE * counts.stages, replica_batch)
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
        return "paceline.train.strategies.pipeline.pipedream:PipeDreamStrategy"

    def undivided(self, request: TrialRequest, options: PipelineOptions) -> PipelineOptions:
        if number(request.keys(PipelineKeys).micro_batches) is not None:
            return options
        return options.model_copy(update={"micro_batches": 1})

    def layout(self, placement: Placement, options: PipelineOptions) -> str:
        return f"{super().layout(placement, options)} m{options.micro_batches}"

    def reduction(self, transport: str, options: PipelineOptions) -> StepReduction:
        reduction = StepReduction(among="stages", shards="node")
        return reduction if options.flushes else replace(reduction, updates="within step")

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
        for stages in range(2, min(cores, MOST_STAGES) + 1):
            layout = {"stages": stages, "threads_per_rank": cores // stages}
            for chosen in _searched_settings(stages, batch):
                yield {**layout, **chosen}


class HybridKeys(PipelineKeys):
    """Keys of `hybrid`."""

    replicas: Count | None = None  # pipelines on a node


class Hybrid(Pipeline):
    """k pipelines of s stages in k * s processes; what is not here is as in a single pipeline."""

    name = "hybrid"
    summary = "several replicas of the model, each split into stages"
    position = 60
    Keys = HybridKeys
    count_key = "replicas"
    layout_key_names = tuple(HybridKeys.model_fields)

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank) or 1
        ranks = number(request.ranks_per_node)
        replicas = number(request.keys(HybridKeys).replicas)
        stages = _stages_given(request)
        if stages is None:
            stages = ranks // replicas if ranks and replicas else DEFAULT_STAGES
        if replicas is None:
            replicas = ranks // stages if ranks else max(2, cores // (stages * threads))
        return NodeCounts(
            ranks=replicas * stages, threads_per_rank=threads, replicas=replicas, stages=stages
        )

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        replicas, stages = number(request.keys(HybridKeys).replicas), _stages_given(request)
        ranks = number(request.ranks_per_node)
        if replicas == 1:
            yield needs_two("replicas", self.name, instead="pipeline")
        if stages == 1:
            yield needs_two("stages", self.name, instead="processes")
        if ranks and replicas != 1 and stages != 1:
            yield from _rank_faults(ranks, replicas, stages)

    def layout(self, placement: Placement, options: PipelineOptions) -> str:
        workers = f"{placement.replicas_per_node}{_DOT}{placement.stages}"
        return f"{workers}{_TIMES}{placement.threads_per_worker} m{options.micro_batches}"

    def layout_keys(self, placement: Placement, options: PipelineOptions) -> dict[str, Any]:
        return {"replicas": placement.replicas_per_node, **super().layout_keys(placement, options)}

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for replicas, stages, threads in searched_layouts(cores):
            layout = {"replicas": replicas, "stages": stages, "threads_per_rank": threads}
            for chosen in _searched_settings(stages, batch // replicas):
                yield {**layout, **chosen}


def searched_layouts(cores: int) -> list[tuple[int, int, int]]:
    """Return (replicas, stages, threads) that use the most cores.

    Two replicas of two stages are the smallest hybrid; fewer than four cores are oversubscribed.
    """
    if cores < 4:
        return [(2, 2, 1)]
    most_stages = min(cores // 2, MOST_STAGES)
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


def _stages_given(request: TrialRequest) -> int | None:
    """Return stages as a number or as one more than the split points, None if neither is given."""
    keys = request.keys(PipelineKeys)
    points = keys.split_points
    return number(keys.stages) or (None if points is None else len(points) + 1)


def _stream_faults(request: TrialRequest, micro_batches: int, counts: NodeCounts) -> Iterator[str]:
    """Yield why a pipeline without flushes cannot run; nothing for other schedules.

    micro_batches: of a step.
    """
    stages, keys = counts.stages, request.keys(PipelineKeys)
    if keys.schedule != "pipedream":
        if keys.vertical_sync is not None:
            yield 'vertical_sync: belongs to schedule = "pipedream"; remove it, or set the schedule'
        return
    replicas = request.nodes * counts.replicas
    if replicas > 1:
        yield f'schedule: "pipedream" has one replica on one node, got {replicas}; use "1f1b"'
    if request.device != "cpu":
        yield (
            'schedule: "pipedream" keeps copies of the weights in the memory of CPUs, got device = '
            f'"{request.device}"; use "1f1b"'
        )
    if micro_batches < stages - 1:
        yield (
            f'micro_batches: {stages} stages with schedule "pipedream" need at least '
            f"{stages - 1}, got {micro_batches}"
        )


def _stream_model_faults(
    facts: ModelFacts, model: str, stages: int, options: PipelineOptions
) -> Iterator[str]:
    """Yield why a pipeline without flushes cannot train a model."""
    # A split point p puts layers from p on into a later stage. It divides layers (a, b) if
    # a < p <= b, and other split points are too few.
    undivided = [
        point
        for point in options.split_points or facts.split_points
        if not any(first < point <= last for first, last in facts.tied_layers)
    ]
    if facts.tied_layers and len(undivided) < stages - 1:
        ties = ", ".join(f"{first} and {last}" for first, last in facts.tied_layers)
        yield (
            f'schedule: with "pipedream" a parameter belongs to one stage, but layers {ties} of '
            f'{model} share one; use "1f1b", or other split_points'
        )
    if facts.batch_norms and options.micro_batches < stages - 1:
        yield (
            f"schedule: layer {facts.batch_norms[0]} of {model} normalises over the whole batch, "
            f'so there is one micro-batch, but "pipedream" needs at least {stages - 1} with '
            f'{stages} stages; use stages = 2, or "1f1b"'
        )


def model_faults(
    model: str, places: Sequence[int], stages: int, split_points: Sequence[int] | None
) -> Iterator[str]:
    """Yield why the model cannot be split into so many stages, or not at these layers.

    places: layers at which a stage of the model may begin.
    """
    if stages > len(places) + 1:
        yield f"stages: {model} has at most {len(places) + 1}, got {stages}"
    wrong = [point for point in split_points or () if point not in places]
    if wrong:
        yield (
            f"split_points: a stage of {model} can begin at layer {', '.join(map(str, places))}, "
            f"got {', '.join(map(str, wrong))}"
        )


def _searched_settings(stages: int, replica_batch: int) -> Iterator[dict[str, Any]]:
    """Yield the schedules that a search tries; replica_batch: samples that one replica gets."""
    factors = _SEARCHED_MICRO_BATCHES_PER_STAGE
    counts = [stages * factor for factor in factors if stages * factor <= replica_batch]
    for micro_batches, schedule, balance in product(counts, FLUSHING_SCHEDULES, get_args(Balance)):
        yield {"micro_batches": micro_batches, "schedule": schedule, "balance": balance}
