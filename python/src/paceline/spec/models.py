"""The spec as values: what may be written, with types and ranges; `rules` says what goes together.

Unknown keys are faults, and nothing is converted silently (strict types).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    StrategyRequest,
    Transport,
    WorkloadName,
)

SCHEMA = 1  # of spec files
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, strict=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Count = PositiveInt | Literal["auto"]
McaParameters = Annotated[dict[str, str], Field(min_length=1)]
_LIST = Field(strict=False)  # TOML's arrays are lists


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Overrides(_Model):
    """Training values that may be set for all, for a workload, or for a trial."""

    precision: Precision | None = None
    memory_format: MemoryFormat | None = None


class _WorkloadOverrides(_Overrides):
    """Training values that must be equal among compared trials, so no trial may set them."""

    image_size: Annotated[int, Field(ge=32, le=1024)] | None = None
    global_batch: PositiveInt | None = None
    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    learning_rate: PositiveFloat | None = None
    momentum: Annotated[float, Field(ge=0, lt=1, strict=False)] | None = None
    dropout: bool | None = None
    reading: ReadingMode | None = None


class TrainingRequest(_WorkloadOverrides):
    """[training]: values for every workload of the experiment."""


class WorkloadRequest(_WorkloadOverrides):
    """[[workloads]]: one workload by name; `data` is a data set, else photos are synthesised."""

    name: WorkloadName
    data: str | None = None
    images: Annotated[int, Field(ge=8)] | None = None


class TrialRequest(_Overrides):
    """[[trials]]: one way of running each workload.

    `workloads`: of these alone. "auto" ranks, replicas, stages or threads means: as many as the
    local strategy has cores for.
    None is what the strategy's default stands for; a key that means nothing to it is a fault.
    """

    launcher: Launcher
    local_strategy: StrategyRequest
    workloads: Annotated[tuple[WorkloadName, ...], Field(min_length=1, strict=False)] | None = None
    transport: Transport | None = None
    reduction: Reduction | None = None  # several nodes with several processes each
    device: Device = "cpu"
    nodes: PositiveInt = 1
    ranks_per_node: Count = "auto"
    threads_per_rank: Count = "auto"
    replicas: Count | None = None  # copies of the model on a node: threads, processes, hybrid
    stages: Count | None = None  # pipeline, hybrid
    micro_batches: Count | None = None  # of a replica's share of a batch: pipeline, hybrid
    schedule: PipelineSchedule | None = None
    balance: Balance | None = None
    # layers before which the model is cut, in the order of the model's layers; instead of balance
    split_points: Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)] | None = (
        None
    )
    oversubscribe: bool = False
    bucket_mb: PositiveFloat | None = None  # of gradients that one message carries; None: 25
    buckets_in_flight: PositiveInt | None = None  # at once; None: as they come
    algorithm: Algorithm | None = None  # transport mpi
    mpi_parameters: dict[str, str] = Field(default_factory=dict)  # launcher mpi: MCA, by name
    compression: Compression | None = None  # of what a step sends; then nothing is equivalent
    compression_rank: PositiveInt | None = None  # powersgd: of the approximation
    compression_density: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None  # topk
    averaging_period: PositiveInt | None = None  # local SGD: steps from one averaging to the next
    averaging_start: Annotated[int, Field(ge=0)] | None = None  # steps that average every gradient


class TuneSettings(_Model):
    """[tune]: the searches for each local strategy's best counts, schedule and cut on this node
    (`paceline tune local`), and for the best way of communicating (`paceline tune comm`).

    A candidate is measured in short trials of `steps` after `warmup_steps`, each a fresh process;
    about one in `keep` goes on to be measured `keep` times as often, up to `repeats` times.
    Lists of what `tune comm` tries stand for its own where they are given; [] leaves that out.
    """

    strategies: Annotated[tuple[LocalStrategy, ...], Field(min_length=1, strict=False)] | None = (
        None  # those that the trials name; all where a trial wants the best one
    )
    steps: PositiveInt = 8
    warmup_steps: Annotated[int, Field(ge=1)] = 2
    repeats: Annotated[int, Field(ge=1, le=64)] = 4
    keep: Annotated[int, Field(ge=2)] = 2
    max_candidates: PositiveInt = 24  # of a strategy on a workload, or of a round of `tune comm`
    timeout_s: PositiveFloat | None = None  # no short trial starts later than that
    oversubscribe: bool = False
    buckets_mb: Annotated[tuple[PositiveFloat | Literal["model"], ...], _LIST] | None = None
    buckets_in_flight: Annotated[tuple[PositiveInt | Literal["unbounded"], ...], _LIST] | None = (
        None
    )
    algorithms: Annotated[tuple[Algorithm, ...], _LIST] | None = None  # of transport mpi
    compressions: Annotated[tuple[Compression, ...], _LIST] = ()  # they change the result
    # of mpirun, each entry tried as a whole
    mpi_parameters: Annotated[tuple[McaParameters, ...], _LIST] | None = None


class TelemetrySettings(_Model):
    """[telemetry]: the sidecar. Port 0 takes any free one; -1 serves no metrics.

    Files hold one secret each and may be read by their owner alone: basic_auth_file a line
    USER:PASSWORD, bearer_token_file the token.
    """

    interval_s: Annotated[float, Field(ge=0.1, le=10, strict=False)] = 1.0
    listen_host: str = "127.0.0.1"
    listen_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    enabled: bool = True
    targets_dir: str | None = None  # where a Prometheus that runs anyway looks for sidecars
    textfile_dir: str | None = None  # node_exporter's: gets the last values of every trial
    tls_certificate: str | None = None  # PEM files; with them metrics are served over HTTPS only
    tls_key: str | None = None
    tls_client_ca: str | None = None  # then clients must show a certificate of it
    basic_auth_file: str | None = None
    bearer_token_file: str | None = None

    @model_validator(mode="after")
    def _secrets_that_go_together(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("telemetry: tls_certificate and tls_key go together, got one of them")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("telemetry: tls_client_ca needs tls_certificate and tls_key")
        if self.basic_auth_file is not None and self.bearer_token_file is not None:
            raise ValueError("telemetry: basic_auth_file or bearer_token_file, got both")
        return self


class Limits(_Model):
    """[limits]: how long anything may take, in seconds."""

    trial_s: PositiveFloat = 1800.0
    rendezvous_s: PositiveFloat = 60.0
    collective_s: PositiveFloat = 120.0


class NetworkSettings(_Model):
    """[network]: the interface that ranks talk over; None is loopback, for one node only."""

    interface: str | None = None


class MpiSettings(_Model):
    """[mpi]: how mpirun is found and what else it is told."""

    mpirun: str | None = None
    hostfile: str | None = None
    arguments: tuple[str, ...] = Field(default=(), strict=False)


class SparkSettings(_Model):
    """[spark]: the master; None is `local[ranks]`. `conf` passes to spark-submit."""

    master: str | None = None
    conf: dict[str, str] = Field(default_factory=dict)
    driver_memory: str = "1g"


class Experiment(_Model):
    """A whole spec file. Raises pydantic's ValidationError with every fault."""

    schema_version: Literal[1] = Field(alias="schema")
    name: Name
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    repeats: Annotated[int, Field(ge=1, le=100)] = 3
    keep_tensors: bool = False
    training: TrainingRequest = TrainingRequest()
    workloads: tuple[WorkloadRequest, ...] = Field(min_length=1, strict=False)
    trials: tuple[TrialRequest, ...] = Field(min_length=1, strict=False)
    tune: TuneSettings | None = None
    telemetry: TelemetrySettings = TelemetrySettings()
    limits: Limits = Limits()
    network: NetworkSettings = NetworkSettings()
    mpi: MpiSettings = MpiSettings()
    spark: SparkSettings = SparkSettings()

    @model_validator(mode="after")
    def _unique_workloads(self) -> Self:
        names = [w.name for w in self.workloads]
        if len(set(names)) != len(names):
            raise ValueError(f"workloads: each name once, got {', '.join(names)}")
        return self
