"""One trial as a value: everything a job script needs to run it, and its stable name."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, SerializeAsAny, field_validator, model_validator

from paceline.collectives.host import LOOPBACK
from paceline.plan.spec.descriptors import OptionModel
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS, WORKLOADS
from paceline.plan.spec.model_facts import ModelFacts, model_facts
from paceline.plan.spec.models import Limits, TelemetrySettings
from paceline.plan.spec.placement import Placement
from paceline.plan.spec.reduction import StepReduction
from paceline.plan.spec.values import (
    BatchNorm,
    CheckpointSettings,
    Device,
    FailureSettings,
    FileName,
    MatmulPrecision,
    MemoryFormat,
    Precision,
    ReadingMode,
    Target,
    Whole,
    is_baseline,
    training_steps,
)
from paceline.plan.spec.workloads import split_task_path

__all__ = ["Placement", "Training", "Trial", "trial_name"]


_SECONDS_OF_0_3 = {"every_s", "mtbf_s"}  # keys of [checkpoint]
_WORKLOADS, _WORKLOADS_OF_0_3 = "paceline.train.workloads.", "paceline.workloads."
OptionsT = TypeVar("OptionsT", bound=OptionModel)


def is_built_in(task: str) -> bool:
    """Return whether "module:Class" or "file.py:Class" names a task of Paceline itself."""
    place, _ = split_task_path(task)
    return place.startswith(_WORKLOADS) and not place.endswith(".py")


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Observation(_Value):
    """The part of a trial of `paceline verify`: the reference, or compared with it."""

    reference: str | None  # the trial to compare with; None: this is the reference
    steps: int = 4  # that are compared; runs of 0.3.0 do not say it
    last: int = 0  # steps before the end in which ranks are compared with each other, too
    rounded: bool = False  # train with outputs that differ by roundings
    followed_s: float = 10.0  # after the steps that are compared, in which rows are noted


class Alterations(_Value):
    """Changes by `paceline verify`, with which a script can be compared with its reference."""

    seed: int | None = None  # of all generators, before the script
    no_dropout: bool = False
    same_start: bool = False  # with the weights and buffers with which the reference starts


class ResumePart(_Value):
    """One training of `paceline verify --resume-with`: stopped, continued or uninterrupted."""

    full_from: int = 0  # the first step of which everything is recorded
    stop_after: int | None = None  # end it after so many steps, once there is a checkpoint
    watched: str | None = None  # the folder in which it writes its checkpoint
    words: tuple[str, ...] = ()  # with which the script resumes; they may name the checkpoint


class Script(_Value):
    """A training script of the user, which every rank runs instead of a built-in training."""

    path: str  # absolute; the same on every host
    module: str | None = None  # runs as `python -m` runs it; path is its file
    arguments: tuple[str, ...]
    directory: str  # in which it runs
    samples_per_step: int | None  # of all ranks, as the user states; None: the script may report it
    observe: Observation | None = None
    altered: Alterations | None = None
    resume: ResumePart | None = None


class Evaluation(_Value):
    """Evaluations of the model on samples that are not trained on, the same for all trials.

    They take place after every so many steps or epochs, and after the last step.
    """

    held_out_samples: int  # of the training's own data; 0 with held_out_data
    split_seed: int  # which samples these are
    every_steps: int | None
    every_epochs: int | None
    target: Target | None = None
    held_out_data: str | None = None  # absolute path or URL of a data set of their own

    def is_due(self, step: int, steps_per_epoch: int, steps: int) -> bool:
        """Return whether there is one after `step` (counted from 0) of `steps`."""
        done = step + 1
        every = self.every_steps or (self.every_epochs or 1) * steps_per_epoch
        return done == steps or done % every == 0


class Training(_Value):
    """The training task itself.

    Trials are comparable only if all of this is equal, except for the values that a trial may
    override, which are compared on purpose. With a script, only the workload's name, the seed,
    max_steps and warmup_steps have a meaning beside it.
    """

    workload: FileName
    model: str
    dataset: str  # absolute path or URL; "" with a script or items
    seed: int
    image_size: Whole
    global_batch: Whole
    epochs: Whole
    max_steps: Whole | None
    warmup_steps: Whole
    learning_rate: float  # for the global batch: scaled
    momentum: float
    dropout: bool = True
    reading: ReadingMode = "memory"
    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    batch_norm: BatchNorm = "global"
    learning_rate_warmup_steps: Whole = 0
    activation_checkpointing: bool = False
    accumulation_steps: int | None = None  # None: as the task says
    compile: bool = False
    float32_matmul_precision: MatmulPrecision = "highest"
    cudnn_autotuning: bool = False
    script: Script | None = None
    evaluation: Evaluation | None = None
    task: str = ""  # "module:Class" or "file.py:Class"; "" is the class of the workload
    task_sha256: str | None = None  # of the file
    options: dict[str, Any] = {}  # of the task
    items: Whole | None = None  # samples of the task's own map-style data set
    cache: str | None = None  # folder on each node that keeps files of a remote data set
    # entry of [[workloads]], if this is its training with one of several global batches
    entry: str | None = None
    batch_per_replica: int | None = None  # by which the global batch grows (weak scaling)

    @field_validator("task", mode="before")
    @classmethod
    def _task_here(cls, given: Any) -> Any:
        """Find the built-in task of a trial of 0.3.0, whose workloads were in another package."""
        if not isinstance(given, str) or not given.startswith(_WORKLOADS_OF_0_3):
            return given
        return _WORKLOADS + given.removeprefix(_WORKLOADS_OF_0_3)

    @property
    def entry_name(self) -> str:
        """Name of the entry of [[workloads]], which has the data set."""
        return self.entry or self.workload

    @property
    def arithmetic(self) -> str:
        """Name of the arithmetic: the precision, with that of matrix products if it is lower."""
        if self.float32_matmul_precision == "highest":
            return self.precision
        return f"{self.precision} {self.float32_matmul_precision}"

    @property
    def unusual(self) -> list[tuple[str, str]]:
        """Ways to compute that are not the default: part of the trial's name, and label."""
        steps, matmul = self.accumulation_steps, self.float32_matmul_precision
        ways = (
            (self.batch_norm == "per-replica", "bn-per-replica", "own BN"),
            (self.activation_checkpointing, "checkpointed", "activation checkpointing"),
            (steps is not None, f"accumulate{steps}", f"accumulate {steps}"),
            (self.compile, "compiled", "compiled"),
            (matmul != "highest", f"matmul-{matmul}", f"matmul {matmul}"),
            (self.cudnn_autotuning, "autotuned", "cuDNN autotuned"),
        )
        return [(name, label) for is_chosen, name, label in ways if is_chosen]

    @property
    def target(self) -> Target | None:
        """The quality to reach; None without one."""
        return None if self.evaluation is None else self.evaluation.target


def task_facts(training: Training) -> ModelFacts:
    """Return sizes and split points of the model; the first call takes 1 to 2 s."""
    task = training.task or WORKLOADS.get(training.workload).implementation
    # Their inputs are images, whatever the data set.
    of_images = {w.implementation for w in WORKLOADS.all() if not w.own_samples}
    data = "" if task in of_images else training.dataset
    options = json.dumps(training.options, sort_keys=True)
    return model_facts(task, options, data, training.items or 0)


def planned_steps(training: Training, samples: int | None) -> int | None:
    """Return the number of steps; None for a script, which decides itself when it ends."""
    if samples is None:
        return training.max_steps
    return training_steps(samples, training.global_batch, training.epochs, training.max_steps)


class Trial(_Value):
    """One run of one configuration and repeat.

    A configuration is a workload, launcher, transport, local strategy, placement and precision.
    The three options are models of the extensions, see `paceline.plan.spec.descriptors`.
    """

    schema_version: Literal[2] = 2
    id: FileName  # it names files that are written, also for a trial of somebody else
    experiment: FileName
    repeat: Whole
    launcher: str
    transport: str
    local_strategy: str
    placement: Placement
    training: Training
    strategy_options: SerializeAsAny[OptionModel]
    transport_options: SerializeAsAny[OptionModel]
    launcher_options: SerializeAsAny[OptionModel]
    device: Device = "cpu"
    interface: str = LOOPBACK
    link: str | None = None  # rate of each host's link in a lab; None: that of the hosts
    save_tensors: bool = True
    telemetry: TelemetrySettings = TelemetrySettings()
    limits: Limits = Limits()
    checkpoint: CheckpointSettings | None = None
    restarts: Whole = 0
    failures: FailureSettings | None = None
    arguments: tuple[str, ...] = ()  # of a script, after its own
    environment: dict[str, str] = {}  # of a script's ranks

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _steps_only(cls, given: Any) -> Any:
        """Read the table of a trial of 0.3.0, which may have seconds between two checkpoints.

        It is None where seconds alone decided.
        """
        if not isinstance(given, dict):
            return given
        steps = {key: value for key, value in given.items() if key not in _SECONDS_OF_0_3}
        return None if steps.get("every_steps", 0) is None else steps

    @model_validator(mode="before")
    @classmethod
    def _typed_options(cls, data: Any) -> Any:
        """Read the options by the models of their extensions; missing ones are the defaults."""
        if not isinstance(data, dict):
            return data
        typed = {
            f"{kind}_options": group.get(data[name]).Options.model_validate(
                data.get(f"{kind}_options", {})
            )
            for kind, name, group in (
                ("strategy", "local_strategy", STRATEGIES),
                ("transport", "transport", TRANSPORTS),
                ("launcher", "launcher", LAUNCHERS),
            )
            if name in data
        }
        return {**data, **typed}

    @property
    def planned_repeat(self) -> int:
        """The repeat during which the trial runs, also one that is measured again."""
        return self.repeat % _AGAIN

    @property
    def is_again(self) -> bool:
        """Tell whether the trial measures once more what another trial has measured."""
        return self.repeat >= _AGAIN

    @property
    def options(self) -> tuple[OptionModel, OptionModel, OptionModel]:
        """The options of the strategy, the transport and the launcher."""
        return (self.strategy_options, self.transport_options, self.launcher_options)

    def options_as(self, model: type[OptionsT]) -> OptionsT:
        """Return the options that are of this model.

        Raises TypeError if neither strategy, transport nor launcher has such options.
        """
        for each in self.options:
            if isinstance(each, model):
                return each
        raise TypeError(f"{self.id}: no options of {model.__name__}")

    def option(self, name: str) -> Any:
        """Return an option by its name; None if neither extension has one of that name."""
        return next((getattr(o, name) for o in self.options if name in type(o).model_fields), None)

    @property
    def configuration(self) -> str:
        """The trial's name without its repeat: the key that medians are grouped by.

        `tiny.mpi.gloo.processes.n1r2t1.fp32`, with options that are not the default.
        """
        place, training = self.placement, self.training
        parts = [
            training.workload,
            self.launcher,
            self.transport,
            self.local_strategy,
            f"n{place.nodes}r{place.ranks_per_node}t{place.threads_per_rank}",
            training.precision,
            *self.strategy_options.name_parts(place),
        ]
        if self.device != "cpu":
            parts.append(self.device)
        if training.memory_format != "contiguous":
            parts.append(training.memory_format)
        parts += [name for name, _ in training.unusual]
        parts += self.transport_options.name_parts(place)
        parts += self.launcher_options.name_parts(place)
        if self.link is not None:
            parts.append(_in_a_name(f"link-{self.link}"))
        parts += [_in_a_name(argument) for argument in self.arguments]
        parts += [_in_a_name(f"{name}={value}") for name, value in self.environment.items()]
        return ".".join(parts)

    @property
    def inexact_reasons(self) -> list[str]:
        """Why it computes something else than the baseline; then only its loss is compared."""
        found = [reason for each in self.options if (reason := each.inexact_reason) is not None]
        if self.training.batch_norm == "per-replica":
            part = "replica" if self.micro_batches == 1 else "micro-batch"
            found.append(f"each {part} normalises with the statistics of its own samples")
        return found

    @property
    def micro_batches(self) -> int:
        """Return the parts into which a pipeline divides a replica's samples of a step."""
        count: int = getattr(self.strategy_options, "micro_batches", 1)
        return count

    @property
    def reduction(self) -> StepReduction:
        """Return how gradients become new weights."""
        strategy = STRATEGIES.get(self.local_strategy)
        return strategy.reduction(self.transport, self.strategy_options)

    @property
    def is_exact(self) -> bool:
        """Return whether it computes what the baseline does, apart from the order of sums."""
        return not self.inexact_reasons

    @property
    def is_replayed(self) -> bool:
        """Return whether steps are replayed after the training, from states of the baseline."""
        return self.save_tensors and self.is_exact

    @property
    def round_steps(self) -> int:
        """Steps from one exchange between ranks to the next; a rate covers whole rounds."""
        return max(each.round_steps for each in self.options)

    @property
    def is_baseline(self) -> bool:
        """Return whether it is the sequential process that every speedup is relative to."""
        return is_baseline(self.launcher, self.local_strategy, self.arguments, self.environment)

    @property
    def layout(self) -> str:
        """Replicas, stages and threads of a node, as in `2x1`, for a table's column."""
        return STRATEGIES.get(self.local_strategy).layout(self.placement, self.strategy_options)

    @property
    def layout_keys(self) -> dict[str, Any]:
        """The keys of a [[trials]] entry that give exactly this layout."""
        strategy = STRATEGIES.get(self.local_strategy)
        return strategy.layout_keys(self.placement, self.strategy_options)

    @property
    def labels(self) -> list[str]:
        """Words for the options that differ from their defaults."""
        own = [label for _, label in self.training.unusual]
        own += [] if self.link is None else [f"link {self.link}"]
        own += [*self.arguments, *(f"{name}={value}" for name, value in self.environment.items())]
        return [*own, *(label for each in self.options for label in each.labels())]

    @property
    def details(self) -> list[str]:
        """Words that distinguish configurations of the same layout and labels."""
        return [detail for each in self.options for detail in each.details()]


def _in_a_name(word: str) -> str:
    """Return a word as a part of a name, with a checksum where letters were replaced."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", word.replace("=", "-")).strip("-")[:40]
    if plain == word.strip("-").replace("=", "-"):
        return plain
    return f"{plain}-{zlib.crc32(word.encode()):08x}"


# Repeats from here on measure one of the repeats from 0 on once more.
_AGAIN = 1000


def trial_name(configuration: str, repeat: int) -> str:
    """Return the id of a repeat, which also names its folder."""
    return f"{configuration}.r{repeat % _AGAIN}{'.again' if repeat >= _AGAIN else ''}"


def measured_again(trial: Trial) -> Trial:
    """Return a further trial of the same training, for one that ran beside other work, or whose
    states others replay."""
    repeat = trial.repeat + _AGAIN
    name = trial_name(trial.configuration, repeat)
    return trial.model_copy(update={"repeat": repeat, "id": name})


# --- a rank and its peers as plain values: all that the training knows about its launcher --------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Address of the TCP key-value store that rank 0 serves.

    listen_fd is rank 0's socket, already bound to `host` and listening. So the store listens on
    that address only (given only a host, TCPStore listens on every interface:
    pytorch/pytorch#173909), and the port cannot be taken between its choice and its use.
    """

    host: str
    port: int
    secret: str  # of this trial, with which its ranks sign what they store
    listen_fd: int | None = None

    def for_peers(self) -> StoreAddress:
        """Return what rank 0 sends to the other ranks, over a way that no other account reads."""
        return StoreAddress(host=self.host, port=self.port, secret=self.secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's position among its peers."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this node, from 0
    ranks_on_node: int
    node_index: int
    host: str  # host name of this node, unique among the nodes
    process_started_unix_s: float
    store: StoreAddress | None = None  # None only for a single rank

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes the files that are written once per trial."""
        return self.rank == 0
