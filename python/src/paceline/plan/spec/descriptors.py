"""Base classes of the descriptors: the facts about an extension that others need.

A descriptor is a plain class in the extension's own folder. It imports nothing heavy; the
implementation that it names ("module:attribute") is imported only in the process that needs it.
`extensions` finds descriptors through entry points.

Two models belong to a descriptor. `Keys` are the keys that the extension adds to a [[trials]] entry
of the spec: what the user wrote, None where the user wrote nothing. `Options` are the values of a
planned trial, with every default filled in; trial.json holds them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from paceline.plan.spec.model_facts import ModelFacts, model_facts
from paceline.plan.spec.models import Experiment, TrialRequest, WorkloadRequest
from paceline.plan.spec.placement import NodeCounts, Placement
from paceline.plan.spec.reduction import StepReduction
from paceline.plan.spec.values import absolute_name

LAST = 1000  # position of an extension that does not say where it stands in lists


class KeyModel(BaseModel):
    """Keys of a spec: unknown keys are faults, and no value is converted silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class OptionModel(BaseModel):
    """Options of a planned trial."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @property
    def inexact_reason(self) -> str | None:
        """Why the trial computes something else than the baseline; None if it does not."""
        return None

    @property
    def round_steps(self) -> int:
        """Steps from one exchange between ranks to the next; a rate covers whole rounds."""
        return 1

    def exact_form(self) -> Self:
        """Return the options of the equivalent training that differs in nothing else."""
        return self

    def name_parts(self, placement: Placement) -> Iterator[str]:
        """Yield suffixes of the configuration's name for options that are not the defaults."""
        yield from ()

    def labels(self) -> Iterator[str]:
        """Yield words for tables and figures: the options that differ from their defaults."""
        yield from ()

    def details(self) -> Iterator[str]:
        """Yield words that a table adds where two configurations would have the same label."""
        yield from ()


class Descriptor:
    """Facts that every extension states."""

    name: ClassVar[str]  # in specs, files and tables; equal to the name of the entry point
    summary: ClassVar[str]  # one line for lists and help
    implementation: ClassVar[str] = ""  # "module:attribute"
    position: ClassVar[int] = LAST  # in lists and tables, ascending
    Keys: ClassVar[type[KeyModel]] = KeyModel
    Options: ClassVar[type[OptionModel]] = OptionModel
    # Those of its keys that act in Paceline's own training only, not in a script of the user.
    keys_of_own_training: ClassVar[tuple[str, ...]] = ()


class StrategyDescriptor(Descriptor):
    """A local strategy: how one node uses its cores or devices."""

    has_peers_on_node: ClassVar[bool] = False  # several ranks on one node
    uses_node_memory: ClassVar[bool] = False  # always, between the ranks of a node
    can_reduce_flat: ClassVar[bool] = False  # one replica a rank: all ranks can reduce together
    needs_messages: ClassVar[bool] = False  # point-to-point, at any time
    needs_process_group: ClassVar[bool] = False  # of torch, also between the ranks of one node
    # whether the ranks of a node have room for the whole model, which evaluations need
    holds_whole_model: ClassVar[bool] = True
    # "best" may become it: it is equivalent with its defaults, and made for speed
    is_candidate_for_best: ClassVar[bool] = True
    runs_scripts: ClassVar[bool] = False  # a user's script can be each rank's program
    count_key: ClassVar[str | None] = None  # the key that "auto" takes from the node's cores
    layout_key_names: ClassVar[tuple[str, ...]] = ()  # own keys that a search for a layout finds
    without_cuda: ClassVar[str | None] = None  # why it has no GPUs and what to use instead
    # Values of a training that it can apply beside the others.
    can_compile: ClassVar[bool] = False
    can_scale_loss: ClassVar[bool] = False  # fp16
    can_accumulate: ClassVar[bool] = True  # ranks may divide their samples of a step differently

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        """Return the counts on a node with `cores` cores: the meaning of "auto".

        Called only for a request without faults. More cores must not give smaller counts.
        """
        raise NotImplementedError

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        """Yield contradictions among the counts of one [[trials]] entry."""
        yield from ()

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        """Yield other combinations that cannot work, each with the key, the reason and the fix."""
        yield from ()

    def batch_faults(
        self,
        request: TrialRequest,
        counts: NodeCounts,
        replica_batch: int,
        workload: WorkloadDescriptor,
    ) -> Iterator[str]:
        """Yield why this layout cannot train this workload.

        replica_batch: samples of a full batch that one replica gets.
        """
        yield from ()

    def task_faults(
        self,
        workload: WorkloadDescriptor,
        placement: Placement,
        options: Any,
        *,
        activation_checkpointing: bool,
    ) -> Iterator[str]:
        """Yield why it cannot train the task of a workload with the planned options.

        Reasons that follow from the other attributes and methods are yielded elsewhere.
        """
        yield from ()

    def options(
        self, request: TrialRequest, counts: NodeCounts, replica_batch: int, transport: str
    ) -> OptionModel:
        """Return the planned options; transport is the name of the resolved one."""
        return self.Options()

    def undivided(self, request: TrialRequest, options: Any) -> OptionModel:
        """Return the options without micro-batches, unless the request gives their number."""
        found: OptionModel = options
        return found

    def reduction(self, transport: str, options: Any) -> StepReduction:
        """Return how gradients become new weights, for the planned options.

        By default each replica updates all parameters, and what nodes send cannot be predicted.
        """
        return StepReduction()

    def implementation_for(self, transport: str, options: Any) -> str:
        """Return the implementation ("module:attribute") for a planned trial."""
        return self.implementation

    def layout(self, placement: Placement, options: Any) -> str:
        """Return the counts for a table's column: replicas x threads of each, as in `2x1`."""
        workers = placement.replicas_per_node * placement.stages
        return f"{workers}\N{MULTIPLICATION SIGN}{placement.threads_per_worker}"

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        """Return the spec keys that give exactly this layout."""
        return {"threads_per_rank": placement.threads_per_rank}

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        """Yield the layouts, as spec keys, that `tune local` tries beside the default.

        batch: samples of a step on this node.
        """
        yield from ()


class TransportDescriptor(Descriptor):
    """A transport: the communication backend between ranks."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)  # whose memory it can send
    needs: ClassVar[str | None] = None  # a capability that the launcher must provide
    spans_nodes: ClassVar[bool] = True
    joins_ranks: ClassVar[bool] = True  # False: for a single rank
    joins_flat_only: ClassVar[bool] = False  # all ranks at once, never node by node
    # torch.distributed calls it once per bucket: gradients can be compressed and counted.
    sends_gradients: ClassVar[bool] = False
    opens_process_group: ClassVar[bool] = True  # the implementation is a transports.Transport
    serves_scripts: ClassVar[bool] = False  # its process group has every operation of torch
    sends_messages: ClassVar[bool] = False  # point-to-point, between any two ranks at any time
    averages_weights: ClassVar[bool] = False  # always local SGD: it never sends gradients

    def all_reduce_algorithms(self, nodes: int, options: Any) -> tuple[str, ...]:
        """Return the algorithms among which it chooses to sum gradients over so many nodes.

        Names are those of `costs.link_cost.ALL_REDUCE`. Empty: its time cannot be predicted.
        """
        return ()

    def auto_priority(self, request: TrialRequest) -> int | None:
        """Return the priority where the spec names no transport; None if it must be named.

        The usable transport with the highest priority is the default.
        """
        return None

    def faults(self, request: TrialRequest) -> Iterator[str]:
        """Yield reasons why it cannot join the trial's ranks, beyond what the attributes say."""
        yield from ()

    def key_faults(self, request: TrialRequest) -> Iterator[str]:
        """Yield combinations of its own keys that cannot work."""
        yield from ()

    def options(self, request: TrialRequest) -> OptionModel:
        """Return the planned options."""
        return self.Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """A method of gradient compression, in the table of `transports.compression`.

    The implementation is called with (numbers, seed, process group) and returns a Compressor.
    """

    name: str
    summary: str
    implementation: str  # "module:attribute"
    Keys: type[KeyModel] = KeyModel
    # Returns the method's numbers, with defaults filled in.
    numbers: Callable[[TrialRequest], dict[str, int | float]] = lambda _: {}


class LauncherDescriptor(Descriptor):
    """A launcher: what starts the ranks.

    The implementation is the command side, a paceline.runner.launchers.base.Launcher. `Settings` is
    the spec table with the launcher's name, for all of its trials.
    """

    provides: ClassVar[frozenset[str]] = frozenset()  # capabilities that transports may need
    spans_nodes: ClassVar[bool] = False
    default_transport: ClassVar[str | None] = None  # between nodes, on the CPU
    restarts_ranks: ClassVar[bool] = False  # its command starts failed ranks again by itself
    # its command waits without a limit for ranks that do not start
    needs_start_limit: ClassVar[bool] = False
    programs: ClassVar[frozenset[str]] = frozenset()  # their children are ranks
    Settings: ClassVar[type[KeyModel]] = KeyModel
    checks: ClassVar[str | None] = None  # "module:function", what `paceline doctor` shows
    # "module:function" of a cluster's address and the wanted slots; `paceline doctor --master`
    cluster_checks: ClassVar[str | None] = None
    render_slurm: ClassVar[str | None] = None  # "module:function", None: cannot be rendered
    render_kubernetes: ClassVar[str | None] = None

    def starts_here(self, options: Any) -> bool:
        """Return whether the ranks of a trial on one node have the cores of this host."""
        return not self.spans_nodes

    def slots(self, options: Any) -> Mapping[str, int] | None:
        """Return how many ranks each host may have; None where nothing says it."""
        return None

    def executor_program(self, options: Any) -> str | None:
        """Return the end of an argument of the processes that hold ranks (executors).

        The launcher starts another one if one dies. None if it has none with these options.
        """
        return None

    def options(self, request: TrialRequest, experiment: Experiment) -> OptionModel:
        """Return the planned options."""
        return self.Options()


class WorkloadDescriptor(Descriptor):
    """A workload: model, data set and the training values where the spec gives none.

    The implementation is the task's class, a subclass of paceline.train.training.task.Task.
    """

    # Where the spec names no data set: `dataset()` of the task has the samples. Otherwise images in
    # class folders are synthesised.
    own_samples: ClassVar[bool] = False
    # Whether rules depend on facts of the model. False: an nn.Sequential without batch
    # normalisation and shared parameters that SGD trains on images, without clipping and without a
    # target of its own; planning is 1 to 2 s faster then.
    needs_facts: ClassVar[bool] = True

    model: ClassVar[str]  # name of the model, for messages and files
    samples: ClassVar[int]  # in the data set that is synthesised
    shorter_side: ClassVar[tuple[int, int]] = (480, 864)  # range in synthetic images, pixels
    # of the data set: those of the task's input and target
    fields: tuple[str, str] = ("image", "label")
    image_size: ClassVar[int]  # of the model's input, pixels, square
    global_batch: ClassVar[int]  # samples
    learning_rate: ClassVar[float] = 0.001
    momentum: ClassVar[float] = 0.9

    _options: str = "{}"
    _data: str = ""
    _samples: int = 0

    def requested(self, request: WorkloadRequest) -> Self:
        """Return the workload with the options and samples of an entry of the spec."""
        values: dict[str, Any] = {"_options": json.dumps(request.options or {}, sort_keys=True)}
        if self.own_samples:  # inputs of the others are images, whatever the data set
            values["_data"] = "" if request.data is None else absolute_name(request.data)
            values["_samples"] = request.samples or self.samples
        found = copy.copy(self)
        vars(found).update(values)
        return found

    def facts(self) -> ModelFacts:
        """Return sizes and split points of the model; the first call takes 1 to 2 s."""
        return model_facts(self.implementation, self._options, self._data, self._samples)
