"""One trial as a value: everything a job script needs to run it, and its stable name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.spec.models import (
    Limits,
    MpiSettings,
    SparkSettings,
    TelemetrySettings,
)
from paceline.spec.values import (
    Launcher,
    LocalStrategy,
    MemoryFormat,
    Precision,
    ReadingMode,
    Transport,
    WorkloadName,
)
from paceline.spec.workloads import ModelName

LOOPBACK = "lo"


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Placement(_Value):
    """Who runs where: nodes x ranks per node x threads per rank."""

    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    threads_per_rank: int = Field(ge=1)
    oversubscribe: bool = False

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cores_per_node(self) -> int:
        return self.ranks_per_node * self.threads_per_rank

    @property
    def cores(self) -> int:
        return self.nodes * self.cores_per_node


class Training(_Value):
    """The training task itself. Trials are comparable only if all of this is equal, but for
    precision and memory format, which are compared on purpose."""

    workload: WorkloadName
    model: ModelName
    dataset: str
    trust_dataset: bool
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
    interface: str = LOOPBACK
    bucket_mb: float = 25.0
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
    if training.memory_format != "contiguous":
        parts.append(training.memory_format)
    if trial.bucket_mb != Trial.model_fields["bucket_mb"].default:
        parts.append(f"b{trial.bucket_mb:g}")
    return ".".join(parts)


def trial_name(configuration: str, repeat: int) -> str:
    return f"{configuration}.r{repeat}"
