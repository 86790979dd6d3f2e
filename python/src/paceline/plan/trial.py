"""One trial as a value: everything a job script needs to run it, and its stable name."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.spec.models import (
    Limits,
    MpiSettings,
    SparkSettings,
    TelemetrySettings,
)
from paceline.spec.values import (
    Algorithm,
    Balance,
    Compression,
    Device,
    Launcher,
    LocalStrategy,
    MemoryFormat,
    PipelineSchedule,
    Precision,
    ReadingMode,
    Reduction,
    Transport,
    WorkloadName,
)
from paceline.spec.workloads import ModelName

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK = "lo"
DEFAULT_BUCKET_MB = 25.0  # as torch's DistributedDataParallel has it


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Placement(_Value):
    """Who runs where: nodes x ranks per node x threads per rank."""

    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    threads_per_rank: int = Field(ge=1)
    oversubscribe: bool = False
    # Cores that the ranks of a node share, where they are fewer than ranks x threads.
    core_budget: int | None = Field(default=None, ge=1)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cores_per_node(self) -> int:
        return self.core_budget or self.ranks_per_node * self.threads_per_rank

    @property
    def cores(self) -> int:
        return self.nodes * self.cores_per_node


class PipelineSettings(_Value):
    """A model in stages, one rank each; where it is cut is chosen by `balance` or given."""

    stages: int = Field(ge=2)
    micro_batches: int = Field(ge=1)  # of a replica's share of a batch
    schedule: PipelineSchedule = "1f1b"
    balance: Balance | None = "time"  # None: as `split points` says
    split_points: tuple[int, ...] | None = None  # the first layer of each stage but the first


class CompressionSettings(_Value):
    """Less to send than the gradients themselves, and what is lost by it."""

    method: Compression
    rank: int | None = Field(default=None, ge=1)  # powersgd
    density: float | None = Field(default=None, gt=0, le=1)  # topk: share of elements that is sent

    def __str__(self) -> str:
        """`powersgd 4`, `topk 0.01`, `bf16`."""
        if self.density is not None:
            return f"{self.method} {self.density:.3g}"
        return self.method if self.rank is None else f"{self.method} {self.rank}"


class AveragingSettings(_Value):
    """Local SGD: ranks step with their own gradients and average weights every `period` steps.

    The first `start_step` steps average every gradient (post-local SGD: Lin et al.: Don't Use
    Large Mini-Batches, Use Local SGD, ICLR 2020).
    """

    period: int = Field(ge=1)
    start_step: int = Field(default=0, ge=0)

    def __str__(self) -> str:
        after = f" after step {self.start_step}" if self.start_step else ""
        return f"every {self.period} steps{after}"


class Training(_Value):
    """The training task itself. Trials are comparable only if all of this is equal, but for
    precision and memory format, which are compared on purpose."""

    workload: WorkloadName
    model: ModelName
    dataset: str
    seed: int
    image_size: int
    global_batch: int
    epochs: int
    max_steps: int | None
    warmup_steps: int
    learning_rate: float
    momentum: float
    dropout: bool
    reading: ReadingMode
    precision: Precision
    memory_format: MemoryFormat


class Trial(_Value):
    """One run of one (workload, launcher, transport, local strategy, placement, precision, seed,
    repeat)."""

    schema_version: Literal[1] = 1
    id: str
    experiment: str
    repeat: int
    launcher: Launcher
    transport: Transport
    local_strategy: LocalStrategy
    placement: Placement
    training: Training
    thread_replicas: int = Field(default=1, ge=1)  # copies of the model in each rank, a thread each
    pipeline: PipelineSettings | None = None
    reduction: Reduction | None = None  # None where there is one node, or one process on each
    device: Device = "cpu"
    interface: str = LOOPBACK
    bucket_mb: float = DEFAULT_BUCKET_MB
    buckets_in_flight: int | None = Field(default=None, ge=1)
    algorithm: Algorithm | None = None  # of transport mpi; None where another carries
    mpi_parameters: dict[str, str] = Field(default_factory=dict)
    compression: CompressionSettings | None = None
    averaging: AveragingSettings | None = None
    save_tensors: bool = True
    telemetry: TelemetrySettings = TelemetrySettings()
    limits: Limits = Limits()
    mpi: MpiSettings = MpiSettings()
    spark: SparkSettings = SparkSettings()

    @property
    def configuration(self) -> str:
        """The trial's name without its repeat: what medians are taken over."""
        return configuration_name(self)

    @property
    def stages(self) -> int:
        """Ranks that one replica of the model is spread over."""
        return 1 if self.pipeline is None else self.pipeline.stages

    @property
    def replicas_per_node(self) -> int:
        """Copies of the model on a node, each with its own part of the batch."""
        return self.placement.ranks_per_node // self.stages * self.thread_replicas

    @property
    def replicas(self) -> int:
        return self.placement.nodes * self.replicas_per_node

    @property
    def threads_per_worker(self) -> int:
        """Threads within an operation: of a rank, or of each of its replicas."""
        return self.placement.threads_per_rank // self.thread_replicas

    @property
    def is_exact(self) -> bool:
        """Whether it computes what the baseline does; else only its loss can be compared."""
        return self.compression is None and self.averaging is None

    @property
    def round_steps(self) -> int:
        """Steps from one exchange between ranks to the next; a rate is over whole rounds."""
        return 1 if self.averaging is None else self.averaging.period

    @property
    def is_baseline(self) -> bool:
        """The sequential process that every speedup is against."""
        return self.launcher == "local" and self.local_strategy == "sequential"


def configuration_name(trial: Trial) -> str:
    """`tiny.mpi.gloo.processes.n1r2t1.fp32`, with what differs from the usual at the end."""
    place, training = trial.placement, trial.training
    parts = [
        training.workload,
        trial.launcher,
        trial.transport,
        trial.local_strategy,
        f"n{place.nodes}r{place.ranks_per_node}t{place.threads_per_rank}",
        training.precision,
    ]
    if trial.thread_replicas > 1:
        parts.append(f"k{trial.thread_replicas}")
    if trial.pipeline is not None:
        parts.append(_pipeline_name(trial.pipeline))
    if trial.reduction is not None:
        parts.append(trial.reduction)
    if trial.device != "cpu":
        parts.append(trial.device)
    if training.memory_format != "contiguous":
        parts.append(training.memory_format)
    if trial.bucket_mb != DEFAULT_BUCKET_MB:
        parts.append(f"b{trial.bucket_mb:g}")
    return ".".join([*parts, *_communication_names(trial)])


def _communication_names(trial: Trial) -> Iterator[str]:
    if trial.buckets_in_flight is not None:
        yield f"f{trial.buckets_in_flight}"
    if trial.algorithm not in (None, "auto"):
        yield str(trial.algorithm)
    if trial.compression is not None:
        yield _compression_name(trial.compression)
    if trial.averaging is not None:
        start = f"after{trial.averaging.start_step}" if trial.averaging.start_step else ""
        yield f"local{trial.averaging.period}{start}"
    if trial.mpi_parameters:
        text = json.dumps(trial.mpi_parameters, sort_keys=True)
        yield f"mca{zlib.crc32(text.encode()):08x}"


def _compression_name(compression: CompressionSettings) -> str:
    """`send-powersgd4`: not `bf16` alone, which is a precision."""
    return "send-" + str(compression).replace(" ", "")


def _pipeline_name(pipeline: PipelineSettings) -> str:
    """`s2m8-1f1b-time`, or with the split points in place of the balance: `s3m8-gpipe-c4c9`."""
    split_points = "".join(f"c{cut}" for cut in pipeline.split_points or ())
    where = split_points or pipeline.balance
    return f"s{pipeline.stages}m{pipeline.micro_batches}-{pipeline.schedule}-{where}"


def trial_name(configuration: str, repeat: int) -> str:
    return f"{configuration}.r{repeat}"
