"""Keys, options and rules that `pipeline` and `hybrid` share."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field

from paceline.spec.counts import number
from paceline.spec.descriptors import KeyModel, OptionModel
from paceline.spec.values import Count, PositiveInt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.spec.model_facts import ModelFacts
    from paceline.spec.models import TrialRequest
    from paceline.spec.placement import NodeCounts, Placement

PipelineSchedule = Literal["gpipe", "1f1b", "pipedream"]
# Those that update the weights once a step, after all micro-batches, and train the same.
FLUSHING_SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b")
Balance = Literal["time", "size"]

STREAM_STORES_ACTIVATIONS = (
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

    stages: Count | None = Field(default=None, description="stages that a replica is split into")
    micro_batches: Count | None = Field(
        default=None, description="micro-batches that a replica's samples are divided into"
    )
    schedule: PipelineSchedule | None = Field(
        default=None, description="order of forward and backward passes"
    )
    vertical_sync: bool | None = Field(
        default=None, description="pipedream: a micro-batch uses one version of the weights"
    )
    balance: Balance | None = Field(
        default=None, description="what the stages share equally: time or size"
    )
    split_points: Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)] | None = (
        Field(default=None, description="first layer of each stage but the first")
    )


class PipelineOptions(OptionModel):
    """Planned options of a model in stages, one rank each."""

    micro_batches: int = Field(ge=1)  # of a replica's share of a batch
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

    @property
    def updates_within_step(self) -> bool:
        return not self.flushes

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


def stages_given(request: TrialRequest) -> int | None:
    """Return stages as a number or as one more than the split points, None if neither is given."""
    keys = request.keys(PipelineKeys)
    points = keys.split_points
    return number(keys.stages) or (None if points is None else len(points) + 1)


def split_faults(request: TrialRequest) -> Iterator[str]:
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


def stream_faults(request: TrialRequest, micro_batches: int, counts: NodeCounts) -> Iterator[str]:
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


def stream_model_faults(
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


def searched_settings(stages: int, replica_batch: int) -> Iterator[dict[str, Any]]:
    """Yield the schedules that a search tries; replica_batch: samples that one replica gets."""
    factors = _SEARCHED_MICRO_BATCHES_PER_STAGE
    counts = [stages * factor for factor in factors if stages * factor <= replica_batch]
    for micro_batches, schedule, balance in product(counts, FLUSHING_SCHEDULES, get_args(Balance)):
        yield {"micro_batches": micro_batches, "schedule": schedule, "balance": balance}
