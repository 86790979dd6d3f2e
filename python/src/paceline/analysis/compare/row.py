"""One configuration's row in a comparison, which is also a row of `paceline compare --json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from paceline.analysis.equivalence.check import Grade
from paceline.analysis.equivalence.ranks import Statement
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.phases import PipelineTimes
from paceline.analysis.trial.reading import DOT
from paceline.analysis.trial.stragglers import Staleness
from paceline.analysis.trial.usage import HostUsage
from paceline.measure.records.files import fields_of
from paceline.measure.records.phases import STEP_PHASES, Phases

SEPARATOR = f" {DOT} "
NO_TRANSPORT = "none"
_SHARED_MEMORY = "shared"


def short_name(row: Row, among: Sequence[Row]) -> str:
    """Return for example `mpi · mpi · processes 2x1`.

    among: all rows of the comparison, from which the name must distinguish this one.
    """
    launcher = [row.setup.launcher]
    if row.setup.transport != NO_TRANSPORT:
        launcher.append(row.setup.transport)
    return SEPARATOR.join([*launcher, strategy_name(row, among)])


def plain_name(row: Row, among: Sequence[Row]) -> str:
    """Return a name for a sentence, for example `processes under mpi` or `one process`.

    It has layout, launcher and transport only where they distinguish it from other rows of its
    workload.
    """
    options = distinctions(row, among)
    more = f" ({', '.join(options)})" if options else ""
    setup = row.setup
    if setup.launcher == "local" and setup.local_strategy == "sequential" and is_single(row):
        return f"one process{more}"
    same = [
        other.setup
        for other in among
        if other.workload == row.workload and other.setup.local_strategy == setup.local_strategy
    ]
    words = [setup.local_strategy]
    if any(other.layout != setup.layout for other in same):
        words.append(setup.layout)
    if any(other.launcher != setup.launcher for other in same) or setup.launcher != "local":
        words.append(f"under {setup.launcher}")
    same = [o for o in same if (o.launcher, o.layout) == (setup.launcher, setup.layout)]
    if any(other.transport != setup.transport for other in same):
        words.append(f"over {setup.transport}")
    return f"{' '.join(words)}{more}"


def full_name(row: Row, among: Sequence[Row]) -> str:
    """Return the short name with the workload, for example `tiny: mpi · mpi · processes 2x1`."""
    return f"{row.workload}: {short_name(row, among)}"


def strategy_name(row: Row, among: Sequence[Row]) -> str:
    """Return strategy and layout, for example `processes 2x1`, without launcher and transport."""
    return SEPARATOR.join([_numbered(row), *distinctions(row, among)])


def distinctions(row: Row, among: Sequence[Row]) -> list[str]:
    """List the options that distinguish a row beyond its strategy and layout."""
    return [*(d for d in row.setup.details if d in _needed(row, among)), *row.setup.labels]


def local_name(row: Row, among: Sequence[Row]) -> str:
    """Name a strategy under launcher `local`, with its transport unless it is shared memory."""
    over = (
        ""
        if row.setup.transport in (NO_TRANSPORT, _SHARED_MEMORY)
        else f" over {row.setup.transport}"
    )
    return strategy_name(row, among) + over


def is_single(row: Row) -> bool:
    """Tell whether one rank with one thread runs on one node, so that no layout needs a word."""
    return (
        row.placement.nodes
        == row.placement.replicas_per_node * row.placement.stages
        == row.placement.threads_per_worker
        == 1
    )


def _numbered(row: Row) -> str:
    return (
        row.setup.local_strategy
        if is_single(row)
        else f"{row.setup.local_strategy} {row.setup.layout}"
    )


def _needed(row: Row, among: Sequence[Row]) -> set[str]:
    """Return the details that differ among the rows with the same name in one workload."""
    same = [
        o.setup.details for o in among if _plain(o) == _plain(row) and o.workload == row.workload
    ]
    everywhere = set(row.setup.details).intersection(*same)
    return set(row.setup.details) - everywhere


def _plain(row: Row) -> tuple[str, ...]:
    return (row.setup.launcher, row.setup.transport, _numbered(row), *row.setup.labels)


COMPUTATION = "computation"
_COMPUTING = ("forward", "backward", "optimizer")
_WORTH_NAMING = 0.1  # of a step: a smaller cost beside the computation is not the main cost


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSetup:
    """Parts of a configuration."""

    launcher: str
    transport: str
    local_strategy: str
    layout: str  # counts on a node, for example `2x1`: replicas x threads
    labels: tuple[str, ...]  # options that differ from their defaults
    details: tuple[str, ...]  # shown only where two configurations have equal labels
    options: dict[str, Any]  # values that belong to the strategy, the transport or the launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlacement:
    """Numbers of nodes, ranks and threads."""

    nodes: int
    ranks: int
    ranks_per_node: int
    threads_per_rank: int
    threads_per_worker: int  # of a rank, or of each replica that is a thread
    replicas: int  # copies of the model, each with its own part of the batch
    replicas_per_node: int
    stages: int  # 1 without a pipeline
    device: str
    cores: int  # allocated, on all nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTraining:
    """Arithmetic and batch."""

    precision: str
    memory_format: str
    global_batch: int | None  # None for a script that does not state its samples
    batch_per_replica: int | None = None  # by which the global batch grows; None: it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatSpeed:
    """Speed of one repeat."""

    repeat: int
    samples_per_s: float | None  # None for a script that does not state its samples
    relative: float  # to the estimate of the configuration
    disturbed: float | None  # probability that other work slowed it; None if it is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpeed:
    """Speed of the steady steps."""

    samples_per_s: Interval | None = None
    step_s: Interval | None = None  # mean step of a repeat
    step_median_s: float | None = None  # over the steps of a repeat
    step_p95_s: float | None = None  # 95th percentile over the steps of a repeat
    speedup: Interval | None = None  # over the baseline of the workload
    wall_speedup: Interval | None = None  # from the launch to the end, without the last checks
    efficiency: Interval | None = None  # per core, over a baseline of the same precision
    samples: int | None = None  # of the steady steps, all repeats
    repeat_speeds: tuple[RepeatSpeed, ...] = ()
    two_speeds: float | None = None  # probability that its repeats have two speeds of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTimes:
    """Times of a trial and of a step, by phase."""

    time_to_first_step_s: float | None = None
    wall_s: float | None = None
    phases_s: Phases
    step_phases_s: Phases
    other_parts_s: Phases  # the known parts of `other`
    main_cost: str | None = None  # a step phase, or `computation`
    main_cost_share: float | None = None  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """Size of the model, and what the strategy does in a step."""

    bytes_sent_per_step: float | None = None  # by rank 0
    parameters: int | None = None  # of the model
    linear_parameters: int | None = None  # of them in linear layers
    pipeline: PipelineTimes | None = None
    staleness: Staleness | None = None  # of recorded updates; None without any


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """Course and end of the training."""

    final_loss: float | None = None
    # each failure that a repeat survived: seconds by part, and steps
    recoveries: tuple[dict[str, float | int | None], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGoal:
    """The quality to reach, and the time to it. All None without a target."""

    target: str | None = None  # in words
    target_reached: int | None = None  # number of repeats
    time_to_target_s: Interval | None = None  # None unless more than half of them reached it
    steps_to_target: float | None = None
    target_speedup: Interval | None = None  # time to the target of the baseline over its own


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEquivalence:
    """Result of the comparison with the training of the baseline."""

    equivalent: bool | None = None
    equivalence_grade: Grade | None = None  # how much of the training that covers, if it is
    equivalence_reason: str | None = None  # why it is not, or why it was not decided
    unexplained_evaluations: tuple[str, ...] = ()  # that differ by more than seeds explain
    is_lossy: bool = False  # on purpose: it may end differently from the baseline
    is_script: bool = False  # of the user; compared by its speed where it could not be checked
    statement: Statement | None = None  # of a script, as of `paceline verify`
    shown: str | None = None  # the statement and its findings
    other_rows: str | None = None  # why a script is not ranked: its steps have other rows
    max_abs_weight_diff: float | None = None
    weights_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration. None: it was not measured.

    Speeds and times with an interval are estimates over the finished repeats; other figures
    are medians over them. In JSON a row is flat: the fields of all groups have unique names.
    """

    configuration: str
    workload: str
    setup: RowSetup
    placement: RowPlacement
    training: RowTraining
    repeats: int = 0  # that finished
    is_baseline: bool = False
    failed: str | None = None  # why no repeat finished
    speed: RowSpeed = field(default_factory=RowSpeed)
    times: RowTimes
    usage: HostUsage = field(default_factory=HostUsage)
    work: RowWork = field(default_factory=RowWork)
    result: RowResult = field(default_factory=RowResult)
    goal: RowGoal = field(default_factory=RowGoal)
    equivalence: RowEquivalence
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the row of `paceline compare --json`, which has no groups."""
        flat: dict[str, Any] = {}
        for name, value in fields_of(self).items():
            flat |= fields_of(value) if is_dataclass(value) else {name: value}
        return flat

    @property
    def has_comparable_speed(self) -> bool:
        """Tell whether its speed may be compared.

        Only equivalent trainings are, and scripts that could not be checked; their row says so.
        Scripts with a batch for each rank compare with those that have as many rows in a step.
        """
        is_fair = self.equivalence.equivalent is True or self.is_unchecked_script
        return is_fair and self.equivalence.other_rows is None and self.speed.step_s is not None

    @property
    def ranked(self) -> bool:
        """Tell whether it has a place in the ranking.

        It is by speed or, with a target, by the time to reach it. That is also fair for trainings
        that are lossy on purpose.
        """
        if self.goal.target is None:
            return self.has_comparable_speed
        is_fair = self.has_comparable_speed or self.is_lossy_on_purpose
        return is_fair and self.goal.time_to_target_s is not None

    @property
    def is_lossy_on_purpose(self) -> bool:
        """Tell whether it is lossy, and nothing else was found wrong."""
        return self.equivalence.is_lossy and self.equivalence.equivalent is None

    @property
    def is_unchecked_script(self) -> bool:
        """Tell whether it is a script of which nobody knows if it trained the same."""
        return (
            self.equivalence.is_script
            and self.equivalence.equivalent is None
            and self.failed is None
        )


def main_cost(step_phases_s: Phases) -> tuple[str, float] | None:
    """Return the main cost of a step and its share; None if no step was measured.

    It is the largest phase beside forward, backward and optimiser if that is at least a tenth of
    the step, else the computation.
    """
    known = {name: s for name in STEP_PHASES if (s := step_phases_s.get(name)) is not None}
    step_s = sum(known.values())
    if step_s <= 0:
        return None
    others = {name: s for name, s in known.items() if name not in _COMPUTING}
    largest = max(others, key=lambda name: others[name], default=None)
    if largest is not None and others[largest] >= _WORTH_NAMING * step_s:
        return largest, others[largest] / step_s
    return COMPUTATION, sum(known.get(name, 0.0) for name in _COMPUTING) / step_s
