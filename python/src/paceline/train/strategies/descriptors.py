"""Descriptors of the strategies without stages and servers, and a base class of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from paceline.plan.spec.descriptors import KeyModel, OptionModel, StrategyDescriptor
from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.spec.models import Experiment, TrialRequest
from paceline.plan.spec.placement import NodeCounts, Placement, divisors, number
from paceline.plan.spec.reduction import AVERAGED_IN_BUCKETS, NODE_SHARDS, StepReduction
from paceline.plan.spec.rules.transport import transport_of
from paceline.plan.spec.values import Count, PositiveInt, Whole

# How the gradients of several nodes with several replicas each are averaged. "zero-1": each node
# averages and updates a part (stage 1 of ZeRO: Rajbhandari et al., SC 2020).
ReductionName = Literal["flat", "hierarchical", "zero-1"]
# Local SGD where the transport always averages weights: SparkNet (Moritz et al., ICLR 2016) takes
# 10 to 50 steps.
DEFAULT_PERIOD_STEPS = 10


def needs_two(key: str, strategy: str, *, instead: str) -> str:
    """Return the fault of a key that is 1. instead: the strategy for one."""
    return f'{key}: "{strategy}" needs at least 2, got 1; for one use local_strategy = "{instead}"'


def without_all_reduce(request: TrialRequest, setting: str, instead: str) -> Iterator[str]:
    """Yield the faults of keys that need all-reduces of gradients, which a setting does not use.

    instead: a setting that does.
    """
    for key in ("compression", "sufficient_factors"):
        if request.extension_keys.get(key) not in (None, "never"):
            yield (
                f"{key}: replaces all-reduces of gradients, but {setting} has none; remove it, or "
                f"use {instead}"
            )


class ReplicaPerNode(StrategyDescriptor):
    """One process on a node with one replica."""

    implementation = "paceline.train.strategies.ddp:DdpStrategy"
    runs_scripts = True
    can_compile = True
    can_scale_loss = True

    def reduction(self, transport: str, options: Any) -> StepReduction:
        return AVERAGED_IN_BUCKETS


class Sequential(ReplicaPerNode):
    """One replica per node, one thread each."""

    name = "sequential"
    summary = "one process, one thread"
    position = 10

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        return NodeCounts(ranks=1, threads_per_rank=1)

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        if request.threads_per_rank not in (1, "auto"):
            yield (
                f'threads_per_rank: "sequential" has one thread, got {request.threads_per_rank}; '
                'use local_strategy = "intraop" for the threads of the framework'
            )

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {}


class Intraop(ReplicaPerNode):
    """One replica per node on all of its cores."""

    name = "intraop"
    summary = "one process, the framework's own threads"
    position = 20
    count_key = "threads_per_rank"
    without_cuda = (
        '"intraop" uses threads of the CPU, expected "cpu", got "cuda"; use local_strategy = '
        '"sequential" for one GPU'
    )

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        return NodeCounts(ranks=1, threads_per_rank=number(request.threads_per_rank) or cores)

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        yield {"threads_per_rank": cores}


class ThreadsKeys(KeyModel):
    """Keys of `threads`."""

    replicas: Count | None = None  # copies of the model on a node


class ThreadsOptions(OptionModel):
    """Planned options of `threads`: the placement says everything."""

    def name_parts(self, placement: Placement) -> Iterator[str]:
        yield f"k{placement.replicas_per_rank}"


class Threads(StrategyDescriptor):
    """k replicas in k threads of one process."""

    name = "threads"
    summary = "one process, a replica of the model per thread"
    position = 30
    implementation = "paceline.train.strategies.threads:ThreadsStrategy"
    Keys = ThreadsKeys
    Options = ThreadsOptions
    count_key = "replicas"
    layout_key_names = ("replicas",)
    without_cuda = (
        '"threads" has its replicas in one process, and GPUs need one process each; use '
        'local_strategy = "processes"'
    )

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank)
        replicas = number(request.keys(ThreadsKeys).replicas) or threads or max(2, cores)
        return NodeCounts(ranks=1, threads_per_rank=threads or replicas, replicas=replicas)

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        replicas = number(request.keys(ThreadsKeys).replicas)
        threads = number(request.threads_per_rank)
        if replicas == 1:
            yield needs_two("replicas", self.name, instead="sequential")
        elif replicas is None and threads == 1:
            yield (
                'threads_per_rank: "threads" needs at least 2, one for each replica, got 1; use 2 '
                "or more"
            )
        elif replicas and threads and threads % replicas:
            yield (
                f"threads_per_rank: expected a multiple of the {replicas} replicas, got {threads}; "
                f"use {-(-threads // replicas) * replicas}"
            )

    def reduction(self, transport: str, options: Any) -> StepReduction:
        return NODE_SHARDS

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {"replicas": placement.replicas_per_node, **super().layout_keys(placement, options)}

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for replicas in divisors(cores):
            yield {"replicas": replicas, "threads_per_rank": cores}


class ProcessPerReplica(StrategyDescriptor):
    """k processes on a node with one replica each; at least two unless the request says one."""

    has_peers_on_node = True
    count_key = "ranks_per_node"

    def requested_ranks(self, request: TrialRequest) -> int | None:
        """Return the number of processes on a node that the request gives; None if open."""
        return number(request.ranks_per_node)

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = number(request.threads_per_rank) or 1
        ranks = self.requested_ranks(request) or max(2, cores // threads)
        return NodeCounts(ranks=ranks, threads_per_rank=threads, replicas=ranks)

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        own = {"ranks_per_node": placement.ranks_per_node}
        return own | super().layout_keys(placement, options)

    def search_space(self, cores: int, batch: int) -> Iterator[dict[str, Any]]:
        for ranks in divisors(cores):
            yield {"ranks_per_node": ranks, "threads_per_rank": cores // ranks}


class ProcessesKeys(KeyModel):
    """Keys of `processes`."""

    replicas: Count | None = None  # processes on a node
    reduction: ReductionName | None = None
    # Those of AveragingSettings.
    averaging_period_steps: PositiveInt | None = None
    averaging_start_step: Whole | None = None


class AveragingSettings(OptionModel):
    """Local SGD: ranks step with their own gradients and average weights every `period_steps`.

    The first `start_step` steps average every gradient (post-local SGD: Lin et al.: Don't Use
    Large Mini-Batches, Use Local SGD, ICLR 2020).
    """

    period_steps: PositiveInt
    start_step: Whole = 0

    def __str__(self) -> str:
        after = f" after step {self.start_step}" if self.start_step else ""
        return f"every {self.period_steps} steps{after}"


class ProcessesOptions(OptionModel):
    """Planned options of `processes`."""

    reduction: ReductionName | None = None  # None on one node
    averaging: AveragingSettings | None = None

    @property
    def inexact_reason(self) -> str | None:
        if self.averaging is None:
            return None
        return f"ranks update weights locally and average them ({self.averaging})"

    def exact_form(self) -> Self:
        return self.model_copy(update={"averaging": None})

    @property
    def round_steps(self) -> int:
        return 1 if self.averaging is None else self.averaging.period_steps

    def name_parts(self, placement: Placement) -> Iterator[str]:
        if self.reduction is not None:
            yield self.reduction
        if self.averaging is not None:
            start = self.averaging.start_step
            yield f"local{self.averaging.period_steps}" + (f"after{start}" if start else "")

    def labels(self) -> Iterator[str]:
        if self.reduction == "zero-1":
            yield self.reduction
        if self.averaging is not None:
            yield f"average {self.averaging}"

    def details(self) -> Iterator[str]:
        if self.reduction in ("flat", "hierarchical"):
            yield self.reduction


class Processes(ProcessPerReplica):
    """k processes with one replica each."""

    name = "processes"
    summary = "a process per replica of the model"
    position = 40
    implementation = "paceline.train.strategies.shared_shards:SharedShardsStrategy"
    Keys = ProcessesKeys
    Options = ProcessesOptions
    can_reduce_flat = True
    runs_scripts = True
    can_compile = True
    can_scale_loss = True
    keys_of_own_training = ("reduction", "averaging_period_steps", "averaging_start_step")
    layout_key_names = ("replicas",)

    def requested_ranks(self, request: TrialRequest) -> int | None:
        return super().requested_ranks(request) or number(request.keys(ProcessesKeys).replicas)

    def count_faults(self, request: TrialRequest) -> Iterator[str]:
        ranks, replicas = number(request.ranks_per_node), request.keys(ProcessesKeys).replicas
        if replicas == 1:
            yield needs_two("replicas", self.name, instead="sequential")
        elif ranks and number(replicas) and ranks != replicas:
            yield (
                f"replicas: each process is one, expected {ranks} as ranks_per_node, got "
                f"{replicas}; remove one of the two"
            )

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        keys = request.keys(ProcessesKeys)
        yield from _reduction_faults(request, keys)
        yield from _averaging_faults(request, keys)
        if keys.reduction == "zero-1":
            instead = 'reduction = "hierarchical"'
            yield from without_all_reduce(request, f'reduction = "{keys.reduction}"', instead)

    def options(
        self, request: TrialRequest, counts: NodeCounts, replica_batch: int, transport: str
    ) -> ProcessesOptions:
        keys = request.keys(ProcessesKeys)
        reduction = None
        if request.nodes > 1:
            reduction = keys.reduction or ("flat" if _is_flat(request) else "hierarchical")
        period = keys.averaging_period_steps
        if period is None and TRANSPORTS.get(transport).averages_weights:
            period = DEFAULT_PERIOD_STEPS
        averaging = None
        if period is not None:
            start = keys.averaging_start_step or 0
            averaging = AveragingSettings(period_steps=period, start_step=start)
        return ProcessesOptions(reduction=reduction, averaging=averaging)

    def reduction(self, transport: str, options: ProcessesOptions) -> StepReduction:
        if options.averaging is not None:
            return StepReduction(sends="weights", among="ranks")
        if options.reduction == "zero-1":
            # Its reduce-scatter and its all-gather together move what an all-reduce does.
            return StepReduction(among="nodes", shards="all nodes")
        if options.reduction == "hierarchical" or _is_node_memory(transport):
            return NODE_SHARDS
        return AVERAGED_IN_BUCKETS

    def implementation_for(self, transport: str, options: ProcessesOptions) -> str:
        reduction = self.reduction(transport, options)
        if reduction.averages_weights:
            return "paceline.train.strategies.local_sgd:LocalSgdStrategy"
        if reduction.divides_updates:
            return self.implementation
        return "paceline.train.strategies.ddp:DdpStrategy"


def _is_node_memory(transport: str) -> bool:
    return TRANSPORTS.get(transport).joins_ranks and not TRANSPORTS.get(transport).spans_nodes


def _is_flat(request: TrialRequest) -> bool:
    """Return whether every rank reduces with every other, rather than node by node."""
    keys = request.keys(ProcessesKeys)
    return (
        request.nodes == 1
        or keys.reduction == "flat"
        or keys.averaging_period_steps is not None
        or (request.transport is not None and TRANSPORTS.get(request.transport).joins_flat_only)
        or (request.device == "cuda" and keys.reduction is None)
    )


def _reduction_faults(request: TrialRequest, keys: ProcessesKeys) -> Iterator[str]:
    if keys.reduction is None:
        return
    if request.nodes == 1:
        yield (
            "reduction: is for processes on several nodes, got nodes = 1; remove it "
            '(on one node, choose transport = "shared" or "gloo")'
        )
    elif keys.reduction == "flat":
        return
    elif request.device == "cuda":
        yield f'reduction: "{keys.reduction}" uses the memory of CPUs; on GPUs use "flat"'
    elif request.transport is not None and TRANSPORTS.get(request.transport).joins_flat_only:
        yield f'reduction: "{request.transport}" reduces among all ranks at once; use "flat"'


def _averaging_faults(request: TrialRequest, keys: ProcessesKeys) -> Iterator[str]:
    name = transport_of(request)
    if keys.averaging_period_steps is None:
        if keys.averaging_start_step is not None:
            yield (
                "averaging_start_step: needs averaging_period_steps, which is missing; add it, or "
                "remove this"
            )
        return
    if keys.reduction not in (None, "flat"):
        yield (
            "averaging_period_steps: local SGD averages the weights of all ranks at once; use "
            'reduction = "flat", or remove one of the two'
        )
    transport = None if name is None else TRANSPORTS.get(name)
    if transport is None or not (transport.averages_weights or transport.sends_gradients):
        able = [t.name for t in TRANSPORTS.all() if t.averages_weights or t.sends_gradients]
        yield (
            "averaging_period_steps: expected a transport that averages weights "
            f'({", ".join(able)}), got "{name}"'
        )


class Sharded(ProcessPerReplica):
    """k processes with one replica each, whose parameters lie on all ranks."""

    name = "sharded"
    summary = "a process per replica, parameters divided among all ranks (fully_shard)"
    position = 45
    implementation = "paceline.train.strategies.sharded:FullyShardedStrategy"
    is_candidate_for_best = False  # it saves memory rather than time
    needs_process_group = True
    holds_whole_model = False
    can_scale_loss = True
    can_accumulate = False
    without_cuda = (
        'local_strategy "sharded" divides parameters in the memory of CPUs, expected "cpu", got '
        '"cuda"; use local_strategy = "processes"'
    )

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        instead = 'local_strategy = "processes"'
        yield from without_all_reduce(request, f'"{self.name}"', instead)

    def reduction(self, transport: str, options: Any) -> StepReduction:
        # Two all-gathers of the parameters and a reduce-scatter of the gradients: each moves half
        # of what an all-reduce does.
        return StepReduction(among="ranks", shards="all nodes", bytes_per_parameter=6.0)


class HogwildOptions(OptionModel):
    """Planned options of `hogwild`."""

    @property
    def inexact_reason(self) -> str | None:
        return (
            "processes update shared weights without locks (not deterministic, not equivalent by "
            "design)"
        )


class Hogwild(ProcessPerReplica):
    """k processes with one copy of the weights."""

    name = "hogwild"
    summary = "processes of one node that update the same weights without locks"
    position = 80
    implementation = "paceline.train.strategies.hogwild:HogwildStrategy"
    Options = HogwildOptions
    is_candidate_for_best = False
    uses_node_memory = True
    without_cuda = (
        'local_strategy "hogwild" updates weights in the memory of CPUs; use local_strategy = '
        '"processes"'
    )

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        if request.nodes > 1:
            yield (
                f'nodes: "hogwild" shares the memory of one node, got {request.nodes}; use '
                'local_strategy = "parameter-server" with update_mode = "asynchronous"'
            )

    def reduction(self, transport: str, options: Any) -> StepReduction:
        return StepReduction(updates="within step")
