"""Spec file as values: the core keys with types and ranges; `rules` checks combinations.

Nothing is converted silently (strict types). A [[trials]] entry and the file itself also take the
keys and tables that extensions declare. They are kept as they were written; `keys` checks them.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from paceline.plan.spec.values import (
    FROM_LIST,
    BatchNorm,
    CheckpointSettings,
    Count,
    Device,
    FailureSettings,
    FewInt,
    LearningRateScaling,
    MatmulPrecision,
    MemoryFormat,
    Name,
    PositiveFloat,
    PositiveInt,
    Precision,
    ReadingMode,
    SpecTable,
    Target,
    Whole,
    is_baseline,
)

SCHEMA = 2  # of spec files
GlobalBatches = Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)]
McaParameters = Annotated[dict[str, str], Field(min_length=1)]
K = TypeVar("K", bound=BaseModel)


def name_of_script(path: str) -> str:
    """Return a workload's name for a script: its file name, as far as a name may have it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(path).stem).lstrip("._-")[:64] or "script"


class Overrides(SpecTable):
    """Training values that may be set for all, for a workload, or for a trial."""

    precision: Precision | None = None
    memory_format: MemoryFormat | None = None
    batch_norm: BatchNorm | None = None  # samples whose statistics normalise a layer's values
    activation_checkpointing: bool | None = None  # compute activations again in the backward pass
    # parts of a worker's samples that it processes one after the other
    accumulation_steps: PositiveInt | None = None
    compile: bool | None = None  # the model (torch.compile)
    float32_matmul_precision: MatmulPrecision | None = None  # of matrix products of float32
    cudnn_autotuning: bool | None = None  # cuDNN measures its kernels and uses the fastest


TRIAL_VALUES = tuple(Overrides.model_fields)


class _WorkloadOverrides(Overrides):
    """Training values that must be equal among compared trials, so no trial may set them."""

    image_size: Annotated[int, Field(ge=32, le=1024)] | None = None
    # several: each is a training of its own, with its own baseline and ranking
    global_batch: PositiveInt | GlobalBatches | None = None
    batch_per_replica: PositiveInt | None = None  # the global batch grows with the replicas
    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    warmup_steps: Whole | None = None
    learning_rate: PositiveFloat | None = None
    # how learning_rate grows with global_batch / reference_batch
    learning_rate_scaling: LearningRateScaling | None = None
    reference_batch: PositiveInt | None = None  # global batch for which learning_rate is meant
    # steps in which the learning rate grows to its value
    learning_rate_warmup_steps: Whole | None = None
    momentum: Annotated[float, Field(ge=0, lt=1, strict=False)] | None = None
    dropout: bool | None = None
    reading: ReadingMode | None = None
    held_out_samples: PositiveInt | None = None  # samples for evaluation, never trained on
    evaluate_every_steps: PositiveInt | None = None
    evaluate_every_epochs: PositiveInt | None = None
    target: Target | None = None  # quality to reach


class TrainingRequest(_WorkloadOverrides):
    """[training]: values for every workload of the experiment."""


class WorkloadRequest(_WorkloadOverrides):
    """[[workloads]]: one workload by name; `data` is a data set, else samples are synthesised.

    With `script` it is a training script of the user, run with `arguments`; with `module`, too,
    `script` names a module, which runs as with `python -m`. samples_per_step: of all ranks in one
    step, where the script does not report them.
    With `task` the workload is a class of the user, and `name` is any name.
    """

    name: Name
    task: str | None = None  # class of your own: FILE.py:CLASS or MODULE:CLASS
    options: dict[str, JsonValue] | None = None  # of the task
    data: str | None = None  # path or URL of a data set
    held_out_data: str | None = None  # of another one, to evaluate on
    cache: str | None = None  # folder that keeps files of a remote data set on each node
    samples: Annotated[PositiveInt, Field(ge=8)] | None = None
    script: str | None = None
    module: bool = False
    arguments: Annotated[tuple[str, ...], FROM_LIST] = ()
    samples_per_step: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _named_by_script(cls, values: Any) -> Any:
        script = values.get("script") if isinstance(values, dict) else None
        if not isinstance(script, str) or "name" in values:
            return values
        name = script.replace(".", "-") if values.get("module") is True else script
        return {"name": name_of_script(name), **values}


class TrialRequest(Overrides):
    """[[trials]]: one configuration, run on each workload or on those that `workloads` names.

    Keys of the local strategy, transport and launcher are extras of this model; read them with
    `keys`. None stands for the default. "auto" ranks or threads: as many as the local strategy
    has cores for.
    """

    model_config = ConfigDict(extra="allow")

    launcher: str
    local_strategy: str
    workloads: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    transport: str | None = None
    device: Device = "cpu"
    nodes: FewInt = 1
    link: str | None = None  # rate of each host's link, which only a lab can set
    ranks_per_node: Count = "auto"
    threads_per_rank: Count = "auto"
    oversubscribe: bool = False
    arguments: Annotated[tuple[str, ...], FROM_LIST] = ()  # of a script, after its own
    environment: dict[str, str] = Field(default_factory=dict)  # of a script's ranks

    @property
    def is_baseline(self) -> bool:
        """Return whether it is the sequential process that every speedup is relative to."""
        return is_baseline(self.launcher, self.local_strategy, self.arguments, self.environment)

    @property
    def extension_keys(self) -> dict[str, Any]:
        """The keys beyond the core ones, as written."""
        return self.model_extra or {}

    def keys(self, model: type[K]) -> K:
        """Return those of the extension keys that `model` declares.

        Raises pydantic's ValidationError for a value that is not allowed.
        """
        own = self.extension_keys
        return model.model_validate({k: v for k, v in own.items() if k in model.model_fields})


class TuneSettings(SpecTable):
    """[tune]: the searches for each local strategy's best layout on this node
    (`paceline tune local`), and for the fastest communication (`paceline tune comm`).

    A candidate is measured in short trials of `steps` after `warmup_steps`, each in fresh
    processes. About half of them are kept and measured twice as often, up to `repeats` times
    (successive halving). Lists of values for `tune comm` replace its own lists; [] leaves that out.
    """

    strategies: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = (
        None  # those that the trials name; all where a trial wants the best one
    )
    steps: PositiveInt = 8
    warmup_steps: PositiveInt = 2
    repeats: Annotated[int, Field(ge=1, le=64)] = 4
    max_candidates: PositiveInt = 24  # of a strategy on a workload, or of a round of `tune comm`
    timeout_s: PositiveFloat | None = None  # no short trial starts later than that
    oversubscribe: bool = False
    buckets_mb: Annotated[tuple[PositiveFloat | Literal["model"], ...], FROM_LIST] | None = None
    buckets_in_flight: (
        Annotated[tuple[PositiveInt | Literal["unbounded"], ...], FROM_LIST] | None
    ) = None
    bucket_waits_ms: Annotated[tuple[PositiveFloat, ...], FROM_LIST] | None = None
    algorithms: Annotated[tuple[str, ...], FROM_LIST] | None = None  # of transport mpi
    compressions: Annotated[tuple[str, ...], FROM_LIST] = ()  # they change the result
    # of mpirun, each entry tried as a whole
    mpi_parameters: Annotated[tuple[McaParameters, ...], FROM_LIST] | None = None


LONGEST_INTERVAL_S: float = 10  # between two samples


class TelemetrySettings(SpecTable):
    """[telemetry]: the sidecar. Port 0 takes any free one; -1 serves no metrics.

    Files hold one secret each and may be read by their owner alone: basic_auth_file a line
    USER:PASSWORD, bearer_token_file the token.
    """

    interval_s: Annotated[float, Field(ge=0.1, le=LONGEST_INTERVAL_S, strict=False)] = 1.0
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

    # Keys that name files and folders.
    PATHS: ClassVar[tuple[str, ...]] = (
        "targets_dir", "textfile_dir", "tls_certificate", "tls_key", "tls_client_ca",
        "basic_auth_file", "bearer_token_file",
    )  # fmt: skip

    @model_validator(mode="after")
    def _secrets_that_go_together(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("telemetry: tls_certificate and tls_key go together, got one of them")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("telemetry: tls_client_ca needs tls_certificate and tls_key")
        if self.basic_auth_file is not None and self.bearer_token_file is not None:
            raise ValueError("telemetry: basic_auth_file or bearer_token_file, got both")
        return self


class Limits(SpecTable):
    """[limits]: how long anything may take, in seconds, and how much memory a rank may have."""

    run_s: PositiveFloat | None = None  # with repeats = "auto", no repeat starts later
    trial_s: PositiveFloat = 1800.0
    rendezvous_s: PositiveFloat = 60.0
    slots_s: PositiveFloat = 30.0  # for the executors of a Spark cluster, from the submit
    collective_s: PositiveFloat = 120.0
    rank_memory_mib: PositiveInt | None = None  # private memory of a rank; more is an error


class NetworkSettings(SpecTable):
    """[network]: the interface that ranks use; None is loopback, for one node only."""

    interface: str | None = None


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a table, an optional table or an array of tables; else None."""
    inner = getattr(annotation, "__args__", (annotation,))[0]
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def keys_of_tables() -> list[str]:
    """Return the dotted keys of all tables of a spec, as in `training.max_steps`."""
    tables = {
        name: nested_model(field.annotation)
        for name, field in Experiment.model_fields.items()
        if name not in ("workloads", "trials")  # arrays: the place would need a number
    }
    return [
        f"{name}.{key}" for name, table in tables.items() if table for key in table.model_fields
    ]


class Experiment(SpecTable):
    """A whole spec file. Tables of launchers, such as [mpi], are extras of this model."""

    model_config = ConfigDict(extra="allow")

    schema_version: Literal[2] = Field(alias="schema")
    name: Name
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    vary_seed: bool = False  # repeat r trains with seed + r
    # "auto": until the ranking is decided, at most max_repeats
    repeats: Annotated[int, Field(ge=1, le=100)] | Literal["auto"] = 5
    max_repeats: Annotated[int, Field(ge=2, le=100)] = 8
    tie_margin: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.03  # of a ratio of speeds
    baseline: str | None = None  # shell pattern: speedups are over the fastest that matches
    only: Annotated[tuple[str, ...], FROM_LIST] = ()  # shell patterns of configurations to run
    keep_tensors: bool = False
    measure_again: bool = True  # once, each trial that ran beside other work
    # after a failed rank, the trial continues from its last checkpoint, at most that many times
    restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    training: TrainingRequest = TrainingRequest()
    workloads: tuple[WorkloadRequest, ...] = Field(min_length=1, max_length=100, strict=False)
    trials: tuple[TrialRequest, ...] = Field(min_length=1, max_length=1000, strict=False)
    tune: TuneSettings | None = None
    telemetry: TelemetrySettings = TelemetrySettings()
    limits: Limits = Limits()
    checkpoint: CheckpointSettings | None = None
    failures: FailureSettings | None = None
    network: NetworkSettings = NetworkSettings()

    @property
    def planned_repeats(self) -> int:
        """The largest number of repeats that may run."""
        return self.max_repeats if self.repeats == "auto" else self.repeats

    def settings(self, name: str, model: type[K]) -> K:
        """Return the table of a launcher, such as [mpi]; its defaults where there is none.

        Raises pydantic's ValidationError for a value that is not allowed.
        """
        return model.model_validate((self.model_extra or {}).get(name, {}))

    @model_validator(mode="after")
    def _unique_workloads(self) -> Self:
        names = [w.name for w in self.workloads]
        if len(set(names)) != len(names):
            raise ValueError(f"workloads: expected each name once, got {', '.join(names)}")
        return self
