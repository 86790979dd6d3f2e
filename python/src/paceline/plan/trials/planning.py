"""Plan the trials of a spec, in the order in which they run.

Repeats are blocks: each block holds every trial once, in an order drawn from the seed. So slow
drifts of the machine affect all trials alike, and a run that is cut short has whole blocks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from paceline.base.errors import UsageError
from paceline.collectives.host import LOOPBACK
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS
from paceline.plan.spec.models import TRIAL_VALUES, Experiment, TrialRequest, WorkloadRequest
from paceline.plan.spec.placement import NodeCounts
from paceline.plan.spec.rules.transport import chosen_transport
from paceline.plan.spec.rules.trial import (
    applies,
    batch_per_replica,
    counts_if_known,
    counts_on_node,
)
from paceline.plan.spec.values import (
    DEFAULT_EPOCHS,
    EVALUATION_KEYS,
    CheckpointSettings,
    absolute_name,
    scaled_learning_rate,
)
from paceline.plan.spec.workloads import (
    BatchAxis,
    batch_axis,
    first_given,
    known_steps,
    module_file,
    name_with_batch,
    reads_dataset,
    task_target,
    task_values,
    with_global_batch,
    workload_of,
)
from paceline.plan.trials.rules import duplicate_faults, planned_faults, unsearched_faults
from paceline.plan.trials.trial import Evaluation, Placement, Script, Training, Trial, trial_name

DEFAULT_WARMUP_STEPS = 3


class _PlanError(UsageError):
    """A trial that cannot be planned, for one or several reasons."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class _MisfitError(_PlanError):
    """A trial that another number of cores could have."""


_OF_SCRIPTS = ("max_steps", "warmup_steps")  # the values of [training] that apply to scripts
# values of a spec whose defaults are those of `Training`
_AS_GIVEN = (*TRIAL_VALUES, "learning_rate_warmup_steps", "dropout", "reading")


_Requests = Sequence[tuple[int, TrialRequest]]  # with their places in the spec, from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """The trials on a node with some cores, and what it cannot have."""

    trials: list[Trial]  # of all repeats, interleaved
    left_out: list[str]  # a sentence for each configuration that another machine could have


def plan_trials(experiment: Experiment, datasets: Mapping[str, str], cores: int) -> list[Trial]:
    """Return all trials of `experiment` that a node with `cores` cores can have, interleaved.

    `plan_on_node` says the others, and takes the same arguments.
    """
    return plan_on_node(experiment, datasets, cores).trials


def plan_on_node(experiment: Experiment, datasets: Mapping[str, str], cores: int) -> TrialPlan:
    """Plan all trials of `experiment` for a node with `cores` cores.

    datasets: path or URL of the data set of each workload that reads one, by its name.
    cores: cores of this node that ranks may use.
    A configuration whose counts follow from the cores is left out if no count fits. Raises
    UsageError where other trials cannot be placed, all of them at once, or if none is left.
    """
    found = _Planner(experiment, datasets, cores)
    for workload in experiment.workloads:
        found.plan(workload)
    faults = found.faults
    if not found.block:
        faults += [f"  - {each}" for each in found.left_out]
    if faults:
        raise UsageError(f"experiment {experiment.name!r} cannot be planned:\n" + "\n".join(faults))
    return TrialPlan(trials=_interleaved(experiment, found.block), left_out=found.left_out)


class _Planner:
    """Plans one repeat: each workload with its trials."""

    def __init__(self, experiment: Experiment, datasets: Mapping[str, str], cores: int) -> None:
        self._experiment, self._datasets, self._cores = experiment, datasets, cores
        self._from_cores: set[str] = set()  # configurations whose counts the cores give
        self.block: list[Trial] = []
        self.left_out: list[str] = []
        self.faults: list[str] = []

    def plan(self, workload: WorkloadRequest) -> None:
        """Plan the trials of a workload, with each of its global batches."""
        requests = [
            (place, request)
            for place, request in enumerate(self._experiment.trials, start=1)
            if applies(request, workload)
        ]
        axis = batch_axis(workload, self._experiment)
        if axis is None:
            self._add(workload, requests)
        elif axis.per_replica is None:
            for batch in axis.batches:
                self._add(workload, requests, axis, batch)
        else:
            self._add_weak_scaling(workload, requests, axis, axis.per_replica)

    def _add_weak_scaling(
        self,
        workload: WorkloadRequest,
        requests: _Requests,
        axis: BatchAxis,
        per_replica: int,
    ) -> None:
        """Add the trials, whose replicas give their global batches, and each batch's baselines.

        There is always a baseline with the batch of one replica, to which a table of weak scaling
        is relative.
        """
        first = len(self.block)
        self._add(workload, [each for each in requests if not each[1].is_baseline], axis)
        batches = {per_replica, *(trial.training.global_batch for trial in self.block[first:])}
        baselines = [each for each in requests if each[1].is_baseline]
        for batch in sorted(batches):
            self._add(workload, baselines, axis, batch)

    def _add(
        self,
        workload: WorkloadRequest,
        requests: _Requests,
        axis: BatchAxis | None = None,
        batch: int | None = None,
    ) -> None:
        """Add trials; batch: of the axis, None where the replicas give it."""
        batch_words = "" if batch is None else f", global batch {batch}"
        for place, request in requests:
            where = f"trials[{place}], workload {workload.name}{batch_words}"
            try:
                self.block.append(self._planned(workload, request, axis, batch))
            except _MisfitError as error:
                self.left_out.append(f"{where}: {error}")
            except UsageError as error:
                found = error.faults if isinstance(error, _PlanError) else [str(error)]
                self.faults += [f"  - {where}: {f}" for f in found]

    def _planned(
        self,
        workload: WorkloadRequest,
        request: TrialRequest,
        axis: BatchAxis | None,
        batch: int | None,
    ) -> Trial:
        training_of = self._trainings(workload, axis, batch)
        trial = _trial(self._experiment, workload, request, training_of, self._cores)
        if counts_if_known(request) is None:
            self._from_cores.add(trial.configuration)
        error_type = _MisfitError if trial.configuration in self._from_cores else _PlanError
        _refuse(duplicate_faults(trial, self.block), error_type)
        return trial

    def _trainings(
        self, workload: WorkloadRequest, axis: BatchAxis | None, batch: int | None
    ) -> Callable[[int], Training]:
        """Return a function from the number of a trial's replicas to its training."""
        dataset = self._datasets[workload.name] if reads_dataset(workload) else ""
        if axis is None:
            only = resolve_training(self._experiment, workload, dataset)
        elif batch is not None:
            only = _training_of_axis(self._experiment, workload, dataset, axis, batch)
        else:
            per_replica = axis.per_replica or 0
            return lambda replicas: _training_of_axis(
                self._experiment, workload, dataset, axis, per_replica * replicas
            )
        return lambda _: only


def _training_of_axis(
    experiment: Experiment, workload: WorkloadRequest, dataset: str, axis: BatchAxis, batch: int
) -> Training:
    """Return the training with one of the global batches of a workload."""
    training = resolve_training(experiment, with_global_batch(workload, batch), dataset)
    named = {
        "workload": name_with_batch(workload.name, batch),
        "entry": workload.name,
        "batch_per_replica": axis.per_replica,
    }
    return training.model_copy(update=named)


def resolve_training(experiment: Experiment, workload: WorkloadRequest, dataset: str) -> Training:
    """Return a workload's training values: its own, else [training]'s, else the defaults."""
    defaults = workload_of(workload)

    def value(name: str, otherwise: Any) -> Any:
        of_script = workload.script is not None and name not in _OF_SCRIPTS
        given = None if of_script else first_given(name, workload, experiment)
        return otherwise if given is None else given

    batch = value("global_batch", defaults.global_batch)
    max_steps = value("max_steps", None)
    # max_steps alone decides: an epoch has a step at least
    usual_epochs = DEFAULT_EPOCHS if workload.script is not None else max_steps or DEFAULT_EPOCHS
    steps = known_steps(workload, experiment)
    usual_warmup = DEFAULT_WARMUP_STEPS if steps is None else min(DEFAULT_WARMUP_STEPS, steps - 1)
    return Training(
        workload=workload.name,
        **task_values(workload),
        dataset=dataset,
        seed=experiment.seed,
        image_size=value("image_size", defaults.image_size),
        global_batch=batch,
        epochs=value("epochs", usual_epochs),
        max_steps=max_steps,
        warmup_steps=value("warmup_steps", usual_warmup),
        learning_rate=scaled_learning_rate(
            value("learning_rate", defaults.learning_rate),
            value("learning_rate_scaling", "none"),
            batch,
            value("reference_batch", None) or defaults.global_batch or 1,  # 0: a script
        ),
        momentum=value("momentum", defaults.momentum),
        **{name: given for name in _AS_GIVEN if (given := value(name, None)) is not None},
        cache=None if workload.cache is None else str(Path(workload.cache).absolute()),
        script=None if workload.script is None else _script(workload.script, workload),
        evaluation=_evaluation(experiment, workload),
    )


def _evaluation(experiment: Experiment, workload: WorkloadRequest) -> Evaluation | None:
    """Return the evaluations of a training; by default one after each epoch."""
    if workload.script is not None:
        return None
    given = {name: first_given(name, workload, experiment) for name in EVALUATION_KEYS}
    samples, every_steps = given["held_out_samples"], given["evaluate_every_steps"]
    data = workload.held_out_data
    if samples is None and data is None:
        return None
    return Evaluation(
        held_out_samples=samples or 0,
        held_out_data=None if data is None else absolute_name(data),
        split_seed=experiment.seed,
        every_steps=every_steps,
        every_epochs=None if every_steps is not None else given["evaluate_every_epochs"] or 1,
        target=given["target"] or task_target(workload),
    )


def _script(path: str, workload: WorkloadRequest) -> Script:
    return Script(
        path=str(_file_of(path, workload).absolute()),
        module=path if workload.module else None,
        arguments=workload.arguments,
        directory=str(Path.cwd()),
        samples_per_step=workload.samples_per_step,
    )


def _file_of(script: str, workload: WorkloadRequest) -> Path:
    """Return the file of a script; one that does not exist is reported before any trial begins."""
    file = module_file(script, Path.cwd()) if workload.module else None
    return file or Path(script)


def resolve_placement(request: TrialRequest, counts: NodeCounts, cores: int) -> Placement:
    """Return the counts as a placement; allocated cores are known on a single node only."""
    shared = request.oversubscribe and request.nodes == 1 and counts.threads > cores
    return Placement(
        nodes=request.nodes,
        ranks_per_node=counts.ranks,
        threads_per_rank=counts.threads_per_rank,
        replicas_per_node=counts.replicas,
        stages=counts.stages,
        oversubscribe=request.oversubscribe,
        allocated_cores=cores if shared else None,
    )


def _trial(
    experiment: Experiment,
    workload: WorkloadRequest,
    request: TrialRequest,
    training_of: Callable[[int], Training],
    cores: int,
) -> Trial:
    """Plan one trial. training_of: returns its training with a number of replicas."""
    _refuse(unsearched_faults(request))
    counts = _counts_that_fit(request, workload, training_of, cores)
    training = training_of(request.nodes * counts.replicas)
    strategy = STRATEGIES.get(request.local_strategy)
    replica_batch = batch_per_replica(training.global_batch, request.nodes * counts.replicas)
    transport = chosen_transport(request)
    if workload.script is None:
        options = strategy.options(request, counts, replica_batch, transport)
    else:
        options = strategy.Options()  # a script has its own training
    own = {
        name: getattr(request, name) for name in TRIAL_VALUES if getattr(request, name) is not None
    }
    if counts.stages > 1 and _normalises_over_batch(workload):
        options = strategy.undivided(request, options)
    if request.nodes * counts.replicas == 1 and getattr(options, "micro_batches", 1) == 1:
        own["batch_norm"] = "global"  # the same
    training = training.model_copy(update=own)
    trial = Trial(
        id="unnamed",
        experiment=experiment.name,
        repeat=0,
        launcher=request.launcher,
        transport=transport,
        local_strategy=request.local_strategy,
        placement=resolve_placement(request, counts, cores),
        training=training,
        strategy_options=options,
        transport_options=TRANSPORTS.get(transport).options(request),
        launcher_options=LAUNCHERS.get(request.launcher).options(request, experiment),
        device=request.device,
        interface=experiment.network.interface or LOOPBACK,
        link=request.link,
        telemetry=experiment.telemetry,
        limits=experiment.limits,
        checkpoint=_checkpoint(experiment, workload, transport),
        restarts=experiment.restarts,
        failures=experiment.failures,
        arguments=request.arguments,
        environment=request.environment,
    )
    _refuse(planned_faults(workload, trial))
    return trial


def _counts_that_fit(
    request: TrialRequest,
    workload: WorkloadRequest,
    training_of: Callable[[int], Training],
    cores: int,
) -> NodeCounts:
    """Return the largest counts that batch, samples and model allow; given numbers stand.

    Counts follow from the cores, so those of a smaller node are tried where the node's own do not
    fit. Raises _MisfitError with the faults on the whole node if none fit.
    """
    whole = tried = counts_on_node(request, cores)
    found = faults = list(_fit_faults(request, workload, training_of, whole))
    for fewer in range(cores - 1, 0, -1):
        if not found:
            break
        counts = counts_on_node(request, fewer)
        if counts != tried:
            tried, found = counts, list(_fit_faults(request, workload, training_of, counts))
    if found:
        _refuse(faults, _MisfitError if counts_if_known(request) is None else _PlanError)
    return tried


def _fit_faults(
    request: TrialRequest,
    workload: WorkloadRequest,
    training_of: Callable[[int], Training],
    counts: NodeCounts,
) -> Iterator[str]:
    """Yield why a batch, the samples or a model cannot be divided so."""
    replicas = request.nodes * counts.replicas
    training = training_of(replicas)
    try:
        share = batch_per_replica(training.global_batch, replicas)
    except UsageError as error:
        yield str(error)
        return
    samples = None if counts_if_known(request) is not None else _samples(workload, training)
    if samples is not None and replicas > max(1, samples):
        yield f"{samples} sample(s) cannot be divided among {replicas} replicas"
    strategy = STRATEGIES.get(request.local_strategy)
    yield from strategy.batch_faults(request, counts, share, workload_of(workload))


def _samples(workload: WorkloadRequest, training: Training) -> int | None:
    """Return the samples to train on; None if only a data set or a script knows them."""
    if workload.script is not None:
        return None
    samples = training.items
    if samples is None and workload.data is None:
        samples = workload.samples or workload_of(workload).samples
    if samples is None:
        return None
    return samples - (training.evaluation.held_out_samples if training.evaluation else 0)


def _normalises_over_batch(request: WorkloadRequest) -> bool:
    workload = workload_of(request)
    return workload.needs_facts and bool(workload.facts().batch_norms)


def _refuse(faults: Iterable[str], error_type: type[_PlanError] = _PlanError) -> None:
    """Raise the error if there are faults."""
    if found := list(faults):
        raise error_type(found)


def _checkpoint(
    experiment: Experiment, workload: WorkloadRequest, transport: str
) -> CheckpointSettings | None:
    """Return when a trial writes checkpoints; None if its own training does not.

    A script writes its own checkpoints. The driver of rounds of tasks has the state after each.
    """
    if workload.script is not None or TRANSPORTS.get(transport).averages_weights:
        return None
    return experiment.checkpoint


def _interleaved(experiment: Experiment, block: list[Trial]) -> list[Trial]:
    order = random.Random(experiment.seed)  # noqa: S311  (an order, not a secret)
    trials: list[Trial] = []
    for repeat in range(experiment.planned_repeats):
        shuffled = list(block)
        order.shuffle(shuffled)
        if not repeat or experiment.vary_seed:  # the others replay steps from a baseline's states
            shuffled.sort(key=lambda trial: not trial.is_baseline)
        trials += [repeated(t, repeat, vary_seed=experiment.vary_seed) for t in shuffled]
    return trials


def repeated(trial: Trial, repeat: int, *, vary_seed: bool = False) -> Trial:
    """Return a repeat of a trial, from 0: of the same training, or of one with another seed."""
    training = trial.training
    if vary_seed:
        training = training.model_copy(update={"seed": training.seed + repeat})
    name = trial_name(trial.configuration, repeat)
    return trial.model_copy(update={"repeat": repeat, "id": name, "training": training})


# --- selection by shell patterns: the trials to run with the baselines that they need ------------


def selected_trials(
    trials: Sequence[Trial], patterns: Sequence[str], baseline: str | None = None
) -> list[Trial]:
    """Return the trials whose configuration or id matches a shell pattern, in their order.

    The sequential baselines of their workloads are kept, in fp32 and in their own precision,
    because equivalence is checked against them, and the configurations of `baseline`, unless one of
    them is selected anyway. With a batch for each replica, the baselines of one replica are kept,
    too. Without patterns all trials are returned.
    baseline: shell pattern of the configurations that speedups are relative to.
    Raises UsageError if a pattern matches nothing.
    """
    names = [trial.configuration for trial in trials]
    if baseline is not None and not matching(names, baseline):
        raise no_match("baseline", [baseline], names)
    if not patterns:
        return list(trials)
    unmatched = [p for p in patterns if not any(_matches(trial, p) for trial in trials)]
    if unmatched:
        raise no_match("only", unmatched, names)
    wanted = {trial.id for trial in trials if any(_matches(trial, p) for p in patterns)}
    if baseline is not None:
        chosen = {t.id for t in trials if fnmatchcase(t.configuration, baseline)}
        wanted |= set() if wanted & chosen else chosen
    selected = [trial for trial in trials if trial.id in wanted]
    precisions: dict[str, set[str]] = defaultdict(set)
    for trial in selected:
        for workload in _compared_workloads(trial.training):
            precisions[workload].add(trial.training.precision)
    for workload, own in precisions.items():
        baselines = [t for t in trials if t.is_baseline and t.training.workload == workload]
        same = [t for t in baselines if t.training.precision in {"fp32", *own}]
        wanted |= {trial.id for trial in same or baselines}
    return [trial for trial in trials if trial.id in wanted]


def _compared_workloads(training: Training) -> Iterator[str]:
    """Yield the workload of a training, and that of one replica if the batch grows with them."""
    yield training.workload
    if training.batch_per_replica is not None:
        yield name_with_batch(training.entry_name, training.batch_per_replica)


def without_lone_baselines(trials: Sequence[Trial]) -> list[Trial]:
    """Leave out baselines with a batch for replicas that no other trial has."""
    used = {trial.training.workload for trial in trials if not trial.is_baseline}
    return [
        trial
        for trial in trials
        if not trial.is_baseline
        or trial.training.batch_per_replica is None
        or trial.training.workload in used
        or trial.training.global_batch == trial.training.batch_per_replica
    ]


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names of configurations that match a shell pattern, each once."""
    return [name for name in dict.fromkeys(names) if fnmatchcase(name, pattern)]


def no_match(option: str, patterns: Sequence[str], names: Iterable[str]) -> UsageError:
    """Return the error about patterns that match none of the names."""
    known = list(dict.fromkeys(names))
    parts = [repr(f"*{pattern}*") for pattern in patterns if matching(known, f"*{pattern}*")]
    example = f", for example {', '.join(parts)}," if parts else ""
    listed = "".join(f"\n  - {name}" for name in known)
    return UsageError(
        f"{option}: no configuration matches {', '.join(map(repr, patterns))}; expected shell "
        f"patterns (*, ?, [...]){example} of these names:{listed}"
    )


def _matches(trial: Trial, pattern: str) -> bool:
    return fnmatchcase(trial.configuration, pattern) or fnmatchcase(trial.id, pattern)
