"""Spec -> trials, in the order in which they run.

Repeats are blocks: each block holds every trial once, in an order drawn from the seed. So slow
drifts of the machine fall on all trials alike, and a run that is cut short has whole blocks.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.plan.trial import (
    DEFAULT_BUCKET_MB,
    LOOPBACK,
    AveragingSettings,
    CompressionSettings,
    PipelineSettings,
    Placement,
    Training,
    Trial,
    trial_name,
)
from paceline.spec.communication_rules import is_flat
from paceline.spec.counts import (
    check_micro_batches,
    counts_on_node,
    default_micro_batches,
    number,
    share_of,
)
from paceline.spec.split_places import check_stages
from paceline.spec.trial_rules import applies, open_count_faults
from paceline.spec.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.spec.counts import NodeCounts
    from paceline.spec.models import Experiment, TrialRequest, WorkloadRequest
    from paceline.spec.values import Algorithm, Reduction, Transport

DEFAULT_EPOCHS = 1
DEFAULT_WARMUP_STEPS = 3
DEFAULT_POWERSGD_RANK = 4  # as Vogels et al. (PowerSGD, NeurIPS 2019) use for language models
DEFAULT_DENSITY = 0.01  # Lin et al. (Deep Gradient Compression, ICLR 2018) send 0.1 to 1 %
DEFAULT_ROUND_STEPS = 10  # SparkNet (Moritz et al., ICLR 2016) takes 10 to 50


def plan_trials(experiment: Experiment, datasets: Mapping[str, str], cores: int) -> list[Trial]:
    """All trials of `experiment`, interleaved.

    datasets: path of the data set of each workload, by the workload's name.
    cores: of this node, that ranks may use.
    Raises UsageError where a trial cannot be placed, all of them at once.
    """
    faults: list[str] = []
    blocks: list[Trial] = []
    for workload in experiment.workloads:
        training = resolve_training(experiment, workload, datasets[workload.name])
        for place, request in enumerate(experiment.trials, start=1):
            if not applies(request, workload):
                continue
            try:
                trial = _trial(experiment, request, training, cores)
                _check_new(trial, blocks)
                blocks.append(trial)
            except UsageError as error:
                faults.append(f"  - trials[{place}], workload {workload.name}: {error}")
    if faults:
        raise UsageError(f"experiment {experiment.name!r} cannot be planned:\n" + "\n".join(faults))
    return _interleaved(experiment, blocks)


def resolve_training(experiment: Experiment, workload: WorkloadRequest, dataset: str) -> Training:
    """A workload's training values: its own, else [training]'s, else the workload's defaults."""
    defaults = WORKLOADS[workload.name]

    def value(name: str, otherwise: Any) -> Any:
        for source in (workload, experiment.training):
            given = getattr(source, name)
            if given is not None:
                return given
        return otherwise

    max_steps = value("max_steps", None)
    usual_warmup = DEFAULT_WARMUP_STEPS
    if max_steps is not None:
        usual_warmup = min(usual_warmup, max_steps - 1)
    return Training(
        workload=workload.name,
        model=defaults.model,
        dataset=dataset,
        seed=experiment.seed,
        image_size=value("image_size", defaults.image_size),
        global_batch=value("global_batch", defaults.global_batch),
        epochs=value("epochs", DEFAULT_EPOCHS),
        max_steps=max_steps,
        warmup_steps=value("warmup_steps", usual_warmup),
        learning_rate=value("learning_rate", defaults.learning_rate),
        momentum=value("momentum", defaults.momentum),
        dropout=value("dropout", True),
        reading=value("reading", "memory"),
        precision=value("precision", "fp32"),
        memory_format=value("memory_format", "contiguous"),
    )


def resolve_placement(request: TrialRequest, counts: NodeCounts, cores: int) -> Placement:
    """The counts as a placement; shared cores are told where that is known, on a single node."""
    wanted = counts.ranks * counts.threads_per_rank
    shared = request.oversubscribe and request.nodes == 1 and wanted > cores
    return Placement(
        nodes=request.nodes,
        ranks_per_node=counts.ranks,
        threads_per_rank=counts.threads_per_rank,
        oversubscribe=request.oversubscribe,
        core_budget=cores if shared else None,
    )


def resolve_transport(request: TrialRequest, ranks: int) -> Transport:
    """What carries gradients where the spec is silent: a node's memory, or between nodes MPI's
    own under MPI and Gloo elsewhere; NCCL between the GPUs of processes."""
    if request.transport is not None:
        return request.transport
    if ranks == 1:
        return "none"
    if request.device == "cuda" and request.local_strategy == "processes":
        return "nccl"
    if request.nodes == 1:
        return "shared"
    return "mpi" if request.launcher == "mpi" and request.device == "cpu" else "gloo"


def resolve_reduction(request: TrialRequest) -> Reduction | None:
    """Only processes on several nodes have a choice; GPUs have no memory to share."""
    if request.local_strategy != "processes" or request.nodes == 1:
        return None
    return request.reduction or ("flat" if is_flat(request) else "hierarchical")


def resolve_algorithm(request: TrialRequest, transport: Transport) -> Algorithm | None:
    """Only MPI has a choice that is ours to make."""
    return request.algorithm or "auto" if transport == "mpi" else None


def resolve_compression(request: TrialRequest) -> CompressionSettings | None:
    method = request.compression
    if method is None:
        return None
    return CompressionSettings(
        method=method,
        rank=(request.compression_rank or DEFAULT_POWERSGD_RANK) if method == "powersgd" else None,
        density=(request.compression_density or DEFAULT_DENSITY) if method == "topk" else None,
    )


def resolve_averaging(request: TrialRequest, transport: Transport) -> AveragingSettings | None:
    """Rounds of Spark are local SGD by their nature."""
    period = request.averaging_period
    if period is None:
        if transport != "spark-rounds":
            return None
        period = DEFAULT_ROUND_STEPS
    return AveragingSettings(period=period, start_step=request.averaging_start or 0)


def resolve_pipeline(
    request: TrialRequest, counts: NodeCounts, share: int
) -> PipelineSettings | None:
    """share: samples of a full batch that a replica gets. Raises UsageError if it is too small."""
    if counts.stages == 1:
        return None
    micro_batches = number(request.micro_batches)
    check_micro_batches(micro_batches, share)
    return PipelineSettings(
        stages=counts.stages,
        micro_batches=micro_batches or default_micro_batches(counts.stages, share),
        schedule=request.schedule or "1f1b",
        balance=None if request.split_points is not None else request.balance or "time",
        split_points=request.split_points,
    )


def _trial(experiment: Experiment, request: TrialRequest, training: Training, cores: int) -> Trial:
    for fault in open_count_faults(request):  # a search was to fill them in
        raise UsageError(f"{fault}, or run `paceline tune local SPEC`")
    counts = counts_on_node(request, cores)
    share = share_of(training.global_batch, request.nodes * counts.replicas)
    check_stages(training.model, counts.stages, request.split_points)
    placement = resolve_placement(request, counts, cores)
    transport = resolve_transport(request, placement.ranks)
    own = {
        name: getattr(request, name)
        for name in ("precision", "memory_format")
        if getattr(request, name) is not None
    }
    trial = Trial(
        id="unnamed",
        experiment=experiment.name,
        repeat=0,
        launcher=request.launcher,
        transport=transport,
        local_strategy=request.local_strategy,
        placement=placement,
        training=training.model_copy(update=own),
        thread_replicas=counts.replicas if request.local_strategy == "threads" else 1,
        pipeline=resolve_pipeline(request, counts, share),
        reduction=resolve_reduction(request),
        device=request.device,
        interface=experiment.network.interface or LOOPBACK,
        bucket_mb=request.bucket_mb or DEFAULT_BUCKET_MB,
        buckets_in_flight=request.buckets_in_flight,
        algorithm=resolve_algorithm(request, transport),
        mpi_parameters=request.mpi_parameters,
        compression=resolve_compression(request),
        averaging=resolve_averaging(request, transport),
        telemetry=experiment.telemetry,
        limits=experiment.limits,
        mpi=experiment.mpi,
        spark=experiment.spark,
    )
    return trial.model_copy(update={"id": trial_name(trial.configuration, 0)})


def _check_new(trial: Trial, earlier: list[Trial]) -> None:
    """Raise UsageError if a trial, once planned, is one that is there already."""
    if trial.configuration in {t.configuration for t in earlier}:
        raise UsageError(
            f"with all defaults filled in it is {trial.configuration}, as an earlier one; leave "
            "one out, and use `repeats` to repeat"
        )


def _interleaved(experiment: Experiment, block: list[Trial]) -> list[Trial]:
    order = random.Random(experiment.seed)  # noqa: S311  (an order, not a secret)
    trials: list[Trial] = []
    for repeat in range(experiment.repeats):
        shuffled = list(block)
        order.shuffle(shuffled)
        trials += [
            t.model_copy(update={"repeat": repeat, "id": trial_name(t.configuration, repeat)})
            for t in shuffled
        ]
    return trials
