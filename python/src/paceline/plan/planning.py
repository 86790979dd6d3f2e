"""Spec -> trials, in the order in which they run.

Repeats are blocks: each block holds every trial once, in an order drawn from the seed. So slow
drifts of the machine fall on all trials alike, and a run that is cut short has whole blocks.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.plan.trial import LOOPBACK, Placement, Training, Trial, trial_name
from paceline.spec.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.spec.models import Experiment, TrialRequest, WorkloadRequest
    from paceline.spec.values import Transport

DEFAULT_EPOCHS = 1
DEFAULT_WARMUP_STEPS = 3


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
        for number, request in enumerate(experiment.trials, start=1):
            try:
                blocks.append(_trial(experiment, request, training, cores))
            except UsageError as error:
                faults.append(f"  - trials[{number}], workload {workload.name}: {error}")
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
        trust_dataset=workload.trust_data,
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


def resolve_placement(request: TrialRequest, cores: int) -> Placement:
    """Fill in "auto": `processes` takes a rank a core, `intraop` a thread a core."""
    ranks, threads = request.ranks_per_node, request.threads_per_rank
    if ranks == "auto":
        per_rank = 1 if threads == "auto" else threads
        ranks = max(2, cores // per_rank) if request.local_strategy == "processes" else 1
    if threads == "auto":
        threads = cores if request.local_strategy == "intraop" else 1
    return Placement(
        nodes=request.nodes,
        ranks_per_node=ranks,
        threads_per_rank=threads,
        oversubscribe=request.oversubscribe,
    )


def resolve_transport(request: TrialRequest, ranks: int) -> Transport:
    """What carries gradients where the spec is silent: MPI's own under MPI, Gloo elsewhere."""
    if request.transport is not None:
        return request.transport
    if ranks == 1:
        return "none"
    return "mpi" if request.launcher == "mpi" else "gloo"


def _trial(experiment: Experiment, request: TrialRequest, training: Training, cores: int) -> Trial:
    placement = resolve_placement(request, cores)
    check_batch(training.global_batch, placement.ranks)
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
        transport=resolve_transport(request, placement.ranks),
        local_strategy=request.local_strategy,
        placement=placement,
        training=training.model_copy(update=own),
        interface=experiment.network.interface or LOOPBACK,
        bucket_mb=request.bucket_mb,
        telemetry=experiment.telemetry,
        limits=experiment.limits,
        mpi=experiment.mpi,
        spark=experiment.spark,
    )
    return trial.model_copy(update={"id": trial_name(trial.configuration, 0)})


def check_batch(global_batch: int, ranks: int) -> None:
    """Raise UsageError if full batches cannot be shared out equally."""
    if global_batch % ranks:
        raise UsageError(
            f"a global batch of {global_batch} cannot be divided among {ranks} ranks; "
            f"use a multiple of {ranks}, say {-(-global_batch // ranks) * ranks}"
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
