"""Refuse planned trials that cannot train: cores, model and batch are known, nothing runs yet."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.base.host.files import regular_bytes
from paceline.plan.spec.descriptors import StrategyDescriptor
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS, quoted
from paceline.plan.spec.model_facts import ModelFacts
from paceline.plan.spec.models import TrialRequest, WorkloadRequest
from paceline.plan.spec.rules.trial import open_count_faults
from paceline.plan.spec.values import FailureKind
from paceline.plan.spec.workloads import workload_of
from paceline.plan.trials.trial import Training, Trial, planned_steps, task_facts

FEW_STEPS = 10  # fewer measured steps give wide intervals


def unsearched_faults(request: TrialRequest) -> Iterator[str]:
    """Yield the count of an entry of [[trials]] that a search was to find."""
    for fault in open_count_faults(request):
        yield f"{fault}, or run `paceline tune local SPEC`"


def planned_faults(request: WorkloadRequest, trial: Trial) -> Iterator[str]:
    """Yield why a planned trial cannot train the task of an entry of [[workloads]]."""
    strategy, training = STRATEGIES.get(trial.local_strategy), trial.training
    workload, checkpointing = workload_of(request), trial.training.activation_checkpointing
    if workload.needs_facts:
        yield from _task_faults(workload.facts(), workload.model, strategy, trial)
        yield from _method_faults(workload.facts(), workload.model, strategy, trial)
    yield from strategy.task_faults(
        workload,
        trial.placement,
        trial.strategy_options,
        activation_checkpointing=checkpointing,
    )
    yield from _batch_norm_faults(request, trial)
    yield from _checkpointing_faults(request, requested=checkpointing)
    yield from _arithmetic_faults(strategy, trial)
    yield from _accumulation_faults(request, strategy, trial)
    if TRANSPORTS.get(trial.transport).averages_weights:
        yield from _round_faults(training, trial.transport)
    if training.evaluation is not None and not strategy.holds_whole_model:
        yield (
            "held_out_samples: evaluations need the whole model on each rank, and "
            f'"{strategy.name}" has no room for it; remove it, or use another local_strategy'
        )


def _task_faults(
    facts: ModelFacts, model: str, strategy: StrategyDescriptor, trial: Trial
) -> Iterator[str]:
    """Yield why a strategy cannot train the task."""
    reduction = trial.reduction
    if trial.placement.stages > 1 and facts.splitting_fault is not None:
        yield f'local_strategy "{strategy.name}": {facts.splitting_fault}'
    sharding_fault = facts.sharding_fault
    if facts.unused_parameter is not None and not reduction.updates_by_part:
        sharding_fault = _without_gradient(facts.unused_parameter)
    if reduction.divides_updates and sharding_fault is not None:
        yield (
            f'local_strategy "{strategy.name}" divides the update of {model} among '
            f"workers, but {sharding_fault}; or use a strategy and transport in which each "
            "replica updates all parameters"
        )
    fault = micro_batch_fault(facts.batch_norms, model, trial)
    if fault is not None:
        yield fault
    if TRANSPORTS.get(trial.transport).averages_weights and facts.optimizer != "SGD":
        yield (
            f'transport "{trial.transport}" averages weights and the momentum of SGD; {model} '
            f"has the optimiser {facts.optimizer}; use another transport"
        )


def _method_faults(
    facts: ModelFacts, model: str, strategy: StrategyDescriptor, trial: Trial
) -> Iterator[str]:
    """Yield what a task needs that local SGD or updates with a part of the gradient lack."""
    reduction, is_global = trial.reduction, trial.training.batch_norm == "global"
    sends_weights_only = TRANSPORTS.get(trial.transport).averages_weights
    if reduction.averages_weights and not sends_weights_only and is_global:
        yield from _statistics_faults(facts, model, "local SGD", "remove averaging_period_steps")
    if reduction.averages_weights and sends_weights_only and facts.batch_norms:
        yield (
            f'transport "{trial.transport}" sends weights only, but layer '
            f"{facts.batch_norms[0]} of {model} has running statistics; use another transport"
        )
    if not reduction.updates_by_part:
        return
    name = f'"{strategy.name}"'
    if facts.clip_norm is not None:
        yield (
            f"clip_norm: {model} limits the norm of the whole gradient, which {name} does "
            "not know when it updates a part; set clip_norm = None in the task, or use another "
            "local_strategy"
        )
    if facts.unused_parameter is not None:
        yield (
            f"local_strategy {name} updates every parameter of {model}, but "
            f"{_without_gradient(facts.unused_parameter)}"
        )
    if trial.placement.replicas > 1 and is_global:
        yield from _statistics_faults(facts, model, name, "use another local_strategy")


def _statistics_faults(facts: ModelFacts, model: str, method: str, remedy: str) -> Iterator[str]:
    """Yield why replicas cannot compute a batch's samples at different times."""
    if facts.batch_norms:
        yield (
            f"batch_norm: layer {facts.batch_norms[0]} of {model} normalises over the "
            f"whole batch, but {method} computes its parts at different times; use batch_norm = "
            f'"per-replica", or {remedy}'
        )


def _round_faults(training: Training, transport: str) -> Iterator[str]:
    """Yield values of a training that rounds of tasks cannot have."""
    if training.evaluation is not None:
        yield (
            f'held_out_samples: transport "{transport}" trains in rounds of tasks, which cannot '
            "evaluate; use another transport"
        )
    if training.learning_rate_warmup_steps:
        yield (
            f'learning_rate_warmup_steps: transport "{transport}" keeps no count of steps between '
            "its tasks; remove it, or use another transport"
        )


def _batch_norm_faults(request: WorkloadRequest, trial: Trial) -> Iterator[str]:
    """Yield why a model cannot normalise within each replica."""
    if trial.training.batch_norm != "per-replica":
        return
    model, facts = workload_of(request).model, workload_of(request).facts()
    if not facts.batch_norms:
        yield (
            f'batch_norm: {model} has no batch normalisation, so "per-replica" has no meaning; '
            "remove it"
        )
    parts = trial.micro_batches
    for batch in _batch_sizes(trial.training) if facts.batch_norms_of_several else ():
        # The smallest part of a replica's samples, which are divided as equally as possible.
        if max(1, batch // trial.placement.replicas) < 2 * parts:
            yield (
                f"batch_norm: layer {facts.batch_norms_of_several[0]} of {model} cannot normalise "
                f"a single sample, but a batch of {batch} leaves one to some of "
                f"{trial.placement.replicas} replicas with {parts} micro-batch(es); use another "
                'global_batch, fewer replicas, or batch_norm = "global"'
            )
            return


def _batch_sizes(training: Training) -> Iterator[int]:
    """Yield the sizes of batches that the training has, as far as its samples are known."""
    yield training.global_batch
    if training.items is None:
        return
    held_out = 0 if training.evaluation is None else training.evaluation.held_out_samples
    whole, last = divmod(training.items - held_out, training.global_batch)
    if last and (training.max_steps is None or training.max_steps > whole):
        yield last


def _checkpointing_faults(request: WorkloadRequest, *, requested: bool) -> Iterator[str]:
    """Yield why activations of a model cannot be computed again in segments."""
    workload = workload_of(request)
    if requested and workload.needs_facts:
        fault = workload.facts().splitting_fault
        if fault is not None:
            yield f"activation_checkpointing: it needs the blocks of the model, but {fault}"


def _arithmetic_faults(strategy: StrategyDescriptor, trial: Trial) -> Iterator[str]:
    """Yield ways to compute that a strategy does not have, or that exclude each other."""
    training, averages = trial.training, trial.reduction.averages_weights
    if training.compile and not strategy.can_compile:
        able = quoted(tuple(s.name for s in STRATEGIES.all() if s.can_compile))
        yield (
            f'compile: "{strategy.name}" calls or changes parts of the model by itself, which '
            f"torch.compile would prevent; use local_strategy = {able}, or remove it"
        )
    if training.compile and training.activation_checkpointing:
        yield (
            "compile: activation_checkpointing computes blocks again outside of compiled code; use "
            "one of the two"
        )
    if training.precision == "fp16" and (averages or not strategy.can_scale_loss):
        able = quoted(tuple(s.name for s in STRATEGIES.all() if s.can_scale_loss))
        what = "averages weights" if averages else f'is "{strategy.name}"'
        yield (
            f"precision: fp16 scales the loss, and all updates of a step must use one scale, but "
            f'the trial {what}; use local_strategy = {able} without averaging, or "bf16"'
        )
    if training.precision == "fp16" and getattr(trial.transport_options, "compression", None):
        yield (
            "compression: keeps the errors of earlier gradients, whose scale changes under "
            'precision = "fp16"; use one of the two'
        )
    if training.float32_matmul_precision != "highest" and training.precision != "fp32":
        yield (
            "float32_matmul_precision: applies to matrix products of float32, and "
            f'precision = "{training.precision}" has none; use one of the two'
        )
    if training.cudnn_autotuning and trial.device == "cpu":
        yield (
            'cudnn_autotuning: cuDNN computes on GPUs, expected device = "cuda", got "cpu"; remove '
            "it"
        )


def _accumulation_faults(
    request: WorkloadRequest, strategy: StrategyDescriptor, trial: Trial
) -> Iterator[str]:
    """Yield why a worker cannot divide its samples as the spec says."""
    steps, workload = trial.training.accumulation_steps, workload_of(request)
    if steps is None or steps == 1:
        return
    if trial.placement.stages > 1:
        yield (
            f'accumulation_steps: "{strategy.name}" divides the samples by micro_batches; use that '
            "key, or remove this"
        )
    if not strategy.can_accumulate:
        yield (
            f'accumulation_steps: all ranks of "{strategy.name}" take part in each pass of one, '
            f"expected 1, got {steps}; remove it, or use another local_strategy"
        )
    samples = trial.placement.samples_of_a_replica(trial.training.global_batch)
    if steps > samples:
        yield (
            f"accumulation_steps: a replica has {samples} sample(s) of a step, expected at most as "
            f"many parts, got {steps}; use {samples}, or a larger global_batch"
        )
    if workload.needs_facts and workload.facts().batch_norms:
        yield (
            f"accumulation_steps: layer {workload.facts().batch_norms[0]} of {workload.model} "
            f"normalises over the whole batch, so it cannot be divided: expected 1, got {steps}"
        )


def micro_batch_fault(batch_norms: Sequence[str], model: str, trial: Trial) -> str | None:
    """Return why a trial cannot divide the batch, if layers normalise over the whole one."""
    if not batch_norms or trial.micro_batches == 1 or trial.training.batch_norm != "global":
        return None
    return (
        f"micro_batches: layer {batch_norms[0]} of {model} normalises over the whole batch, so "
        f"expected 1, got {trial.micro_batches}; or use "
        'batch_norm = "per-replica", with which each micro-batch has its own statistics'
    )


def _without_gradient(parameter: str) -> str:
    return (
        f"parameter {parameter} gets no gradient from the model's output; use it in the forward, "
        "remove it, or set requires_grad=False"
    )


# --- cores ----------------------------------------------------------------------------------------


def core_faults(trial: Trial, cores: int) -> Iterator[str]:
    """Yield why the ranks of a trial cannot have their cores, on this host or on listed ones.

    cores: of this host.
    """
    place, launcher = trial.placement, LAUNCHERS.get(trial.launcher)
    slots = launcher.slots(trial.launcher_options)
    if slots is not None:
        yield from _slot_faults(trial, slots)
    if place.nodes > 1 or not launcher.starts_here(trial.launcher_options):
        return
    if place.allocated_cores is not None and place.allocated_cores > cores:
        yield (
            f"{trial.configuration}: its ranks were planned to share {place.allocated_cores} "
            f"cores, there are {cores} here; plan it again on this machine (`paceline run SPEC`)"
        )
    if place.cores_per_node > cores and not place.oversubscribe:
        yield (
            f"{trial.configuration}: {place.ranks_per_node} ranks of {place.threads_per_rank} "
            f"thread(s) need {place.cores_per_node} cores on a node, there are {cores} here; use "
            "fewer ranks or threads, or set oversubscribe to share cores on purpose"
        )


def _slot_faults(trial: Trial, slots: Mapping[str, int]) -> Iterator[str]:
    place = trial.placement
    if len(slots) < place.nodes:
        yield (
            f"{trial.configuration}: hostfile: expected at least {place.nodes} nodes, found "
            f"{len(slots)} ({', '.join(slots) or 'none'}); add hosts or use fewer nodes"
        )
    elif not place.oversubscribe:
        enough = [host for host, count in slots.items() if count >= place.ranks_per_node]
        if len(enough) < place.nodes:
            yield (
                f"{trial.configuration}: hostfile: expected {place.ranks_per_node} slots on each "
                f"of {place.nodes} node(s), {len(enough)} of its hosts have them; write "
                f"slots={place.ranks_per_node} after each host, or set oversubscribe"
            )


def link_faults(trial: Trial, *, in_lab: bool) -> Iterator[str]:
    """Yield why a trial cannot have the rate of its links. in_lab: this host belongs to a lab."""
    if trial.link is not None and not in_lab:
        yield (
            f"{trial.configuration}: the rate of its links can be set between hosts of a lab only "
            "(`paceline lab run SPEC`)"
        )


# --- trials beside each other -------------------------------------------------------------------


def duplicate_faults(trial: Trial, earlier: Iterable[Trial]) -> Iterator[str]:
    """Yield why a trial, once planned, is one that is there already."""
    if trial.configuration in {t.configuration for t in earlier}:
        yield (
            f"with all defaults filled in it is {trial.configuration}, as an earlier one; leave "
            "one out, and use `repeats` to repeat"
        )


def failure_kinds(trial: Trial) -> set[FailureKind]:
    """Return the kinds of failures that the trial can have."""
    kinds: set[FailureKind] = {"rank"}
    if LAUNCHERS.get(trial.launcher).executor_program(trial.launcher_options) is not None:
        kinds.add("executor")
    if trial.placement.nodes > 1:
        kinds.add("host")
    return kinds


def failure_faults(trials: Iterable[Trial]) -> Iterator[str]:
    """Yield kinds of `[failures]` that no trial can have."""
    planned = [(trial.failures.kinds, failure_kinds(trial)) for trial in trials if trial.failures]
    asked = {kind for kinds, _ in planned for kind in kinds}
    missing = sorted(asked - {kind for _, kinds in planned for kind in kinds})
    if missing:
        yield (
            f"failures.kinds: no trial can have failures of kind {', '.join(missing)}; host needs "
            "several nodes, executor a launcher with executors (Spark with a cluster as master)"
        )


# --- a training, once its data set is known -----------------------------------------------------


def training_faults(training: Training, samples: int | None) -> Iterator[str]:
    """Yield the faults of a workload's training: its loss or script, and its number of steps.

    samples: to train on, as far as they are known.
    """
    if training.script is None:
        fault = task_facts(training).loss_fault
    else:
        fault = _script_fault(training.script.path)
    if fault is not None:
        yield f"workload {training.workload}: {fault}"
    if samples is not None:
        yield from _step_faults(training, samples)


def _script_fault(path: str) -> str | None:
    """Return why this interpreter cannot run a script; None if its syntax is right."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each rank says them, too
            compile(regular_bytes(Path(path)), path, "exec", dont_inherit=True)
    except FileNotFoundError:
        return f"{path}: expected a Python file, found none"
    except OSError as error:
        return f"{path}: {error.strerror}"
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        return f"{path}: expected Python, got {error}"
    return None


def _step_faults(training: Training, samples: int) -> Iterator[str]:
    """Yield why no step would be measured."""
    steps = planned_steps(training, samples)
    if steps is None or steps > training.warmup_steps:
        return
    counted = f"{training.epochs} epoch{'s' if training.epochs > 1 else ''}"
    made = f"{steps} step{'s' if steps != 1 else ''}"
    if training.max_steps is not None and steps == training.max_steps:
        advice = f"Set max_steps to at least {training.warmup_steps + 2 * FEW_STEPS}."
    else:
        in_an_epoch = max(1, -(-samples // training.global_batch))
        epochs = -(-(training.warmup_steps + 2 * FEW_STEPS - 3) // in_an_epoch)
        advice = f"Set epochs = {epochs}, or a smaller global_batch."
    yield (
        f"workload {training.workload}: {samples} samples, global batch {training.global_batch}, "
        f"{counted} = {made}; {training.warmup_steps} are warm-up, so nothing would be measured. "
        f"{advice}"
    )
