"""Rules for the file, its tables and its [[workloads]]; `trial` has those of a [[trials]] entry."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, TRANSPORTS, WORKLOADS, quoted
from paceline.plan.spec.models import (
    TRIAL_VALUES,
    Experiment,
    TrialRequest,
    WorkloadRequest,
    keys_of_tables,
)
from paceline.plan.spec.rules.transport import has_peers, strategy_of, transport_of
from paceline.plan.spec.rules.trial import (
    accepts,
    applies,
    are_counts_valid,
    batch_per_replica,
    counts_if_known,
    key_faults,
    name_faults,
    trial_faults,
)
from paceline.plan.spec.secret_values import holds_secret, unrecorded_settings
from paceline.plan.spec.sentences import no_such_key, sentences
from paceline.plan.spec.values import (
    BASELINE,
    EVALUATION_KEYS,
    LEARNING_RATE_KEYS,
    is_remote,
)
from paceline.plan.spec.workloads import (
    BatchAxis,
    batch_axis,
    first_given,
    is_name_with_batch,
    known_steps,
    reads_dataset,
    with_global_batch,
    workload_of,
)

# Training values that a script decides itself.
_OF_BUILT_IN_TRAININGS = (
    "image_size", "global_batch", "batch_per_replica", "epochs", "learning_rate", "momentum",
    "dropout", "reading",
    *TRIAL_VALUES, *LEARNING_RATE_KEYS, *EVALUATION_KEYS,
)  # fmt: skip
# Variables that decide how many threads and which peers a rank has.
_OWN_VARIABLES = (
    "PACELINE_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "MASTER_", "TORCHELASTIC_",
)  # fmt: skip

# List of [tune] -> the key of a [[trials]] entry whose values it holds.
_LISTS = {
    "buckets_mb": "bucket_mb",
    "buckets_in_flight": "buckets_in_flight",
    "bucket_waits_ms": "bucket_wait_ms",
    "algorithms": "algorithm",
    "compressions": "compression",
    "mpi_parameters": "mpi_parameters",
}
_NAMES = ("algorithm", "compression")  # their values are names of extensions or of their keys


def faults_of(experiment: Experiment, skip: Collection[int] = ()) -> list[str]:
    """Return all faults, each with what was expected, what was found and how to correct it.

    skip: places of trials, from 1, that are faulty already and stand here as placeholders.
    """
    trials = [(p, t) for p, t in enumerate(experiment.trials, start=1) if p not in skip]
    faults = [
        f"trials[{place}]: {fault}"
        for place, trial in trials
        for fault in trial_faults(trial, experiment)
    ]
    faults += _table_faults(experiment)
    faults += _secret_faults(experiment)
    faults += [] if skip else _baseline_faults(experiment)
    if experiment.only and experiment.tune is not None:
        faults.append(
            "only: the names of the configurations are known after the search of [tune] only; run "
            "`paceline tune local SPEC`, then `paceline run DIR/tuned.toml --only …`"
        )
    faults += _repeat_faults(experiment)
    faults += _failure_faults(experiment)
    faults += _duplicate_faults(trials)
    faults += _batch_key_faults(experiment)
    for place, workload in enumerate(experiment.workloads, start=1):
        where = f"workloads[{place}]"
        faults += _script_faults(workload, experiment, where)
        unusable = list(_task_faults(workload, where))
        faults += unusable or _workload_faults(workload, experiment, trials)
    return faults + list(_tune_faults(experiment))


def _task_faults(workload: WorkloadRequest, place: str) -> Iterator[str]:
    """Yield why there is no task of a workload."""
    if workload.script is not None:
        return
    if workload.task is None:
        if workload.name not in WORKLOADS:
            yield WORKLOADS.unknown(workload.name, f"{place}.name")
            return
        if workload.options is None and reads_dataset(workload):
            return  # without options the model can be built, so nothing needs its facts yet
    key = "options" if workload.task is None else "task"
    try:
        if not workload_of(workload).facts().items and not reads_dataset(workload):
            yield (
                f"{place}.data: a task of your own needs samples; expected the path or URL of a "
                f"data set, or a task whose dataset() returns some, got neither"
            )
    except (UsageError, EnvironmentLacks) as error:
        yield f"{place}.{key}: {str(error).removeprefix('task: ')}"


def _table_faults(experiment: Experiment) -> Iterator[str]:
    """Yield unknown tables and values that a launcher's table does not allow."""
    tables = {launcher.name: launcher.Settings for launcher in LAUNCHERS.all()}
    with_keys = [name for name, model in tables.items() if model.model_fields]
    for name, table in (experiment.model_extra or {}).items():
        if name not in with_keys:
            known = (field.alias or key for key, field in Experiment.model_fields.items())
            yield f"{name}: {no_such_key(name, [*known, *with_keys], keys_of_tables())}"
            continue
        try:
            tables[name].model_validate(table)
        except ValidationError as error:
            yield from (f"{name}.{sentence}" for sentence in sentences(error.errors()))


def _baseline_faults(experiment: Experiment) -> Iterator[str]:
    baselines = [t for t in experiment.trials if t.is_baseline]
    lacking = [w.name for w in experiment.workloads if not any(applies(t, w) for t in baselines)]
    if lacking:
        wanted = ", ".join(f'{key} = "{name}"' for key, name in BASELINE.items())
        of = f" of {', '.join(lacking)}" if baselines else ""
        yield (
            f"trials: expected the baseline{of} ({wanted}), found none; "
            "every speedup is relative to it"
        )


def _repeat_faults(experiment: Experiment) -> Iterator[str]:
    """Yield keys that apply to `repeats = "auto"` only."""
    if experiment.repeats == "auto":
        return
    given = {
        "max_repeats": "max_repeats" in experiment.model_fields_set,
        "tie_margin": "tie_margin" in experiment.model_fields_set,
        "limits.run_s": experiment.limits.run_s is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        yield f'{name}: applies to repeats = "auto" only, got repeats = {experiment.repeats}'


def _failure_faults(experiment: Experiment) -> Iterator[str]:
    """Yield injected failures that no trial would survive."""
    failures = experiment.failures
    if failures is not None and experiment.restarts < failures.count:
        yield (
            f"failures.count: every failure needs a new start, expected restarts >= "
            f"{failures.count}, got restarts = {experiment.restarts}"
        )


def _batch_key_faults(experiment: Experiment) -> Iterator[str]:
    """Yield keys of batches that exclude each other, and names that a batch makes ambiguous."""
    tables = {"training": experiment.training} | {
        f"workloads[{place}]": workload
        for place, workload in enumerate(experiment.workloads, start=1)
    }
    for where, table in tables.items():
        batch = table.global_batch
        if table.batch_per_replica is not None and batch is not None:
            given = list(batch) if isinstance(batch, tuple) else batch
            yield (
                f"{where}: expected global_batch or batch_per_replica, got global_batch = {given} "
                f"and batch_per_replica = {table.batch_per_replica}; with the second the global "
                "batch grows with the replicas, so remove one"
            )
        if isinstance(batch, tuple) and len(set(batch)) < len(batch):
            yield f"{where}.global_batch: expected each batch once, got {list(batch)}"
    for workload in experiment.workloads:
        if batch_axis(workload, experiment) is None:
            continue
        for other in experiment.workloads:
            if is_name_with_batch(other.name, workload.name):
                yield (
                    f'workloads: "{other.name}" is the name of a training of "{workload.name}" '
                    "with that global batch; expected another name"
                )


def _duplicate_faults(trials: list[tuple[int, TrialRequest]]) -> Iterator[str]:
    seen: set[str] = set()
    for place, trial in trials:
        text = trial.model_dump_json()
        if text in seen:
            yield f"trials[{place}]: equal to an earlier one; use `repeats` to repeat"
        seen.add(text)


def _workload_faults(
    workload: WorkloadRequest, experiment: Experiment, trials: list[tuple[int, TrialRequest]]
) -> Iterator[str]:
    applied = [
        (place, trial)
        for place, trial in trials
        if applies(trial, workload) and are_counts_valid(trial)
    ]
    for place, trial in applied:
        for fault in _batch_faults(trial, workload, experiment):
            yield f"trials[{place}]: workload {workload.name}: {fault}"
    axis = batch_axis(workload, experiment)
    if axis is None:
        yield from _step_faults(workload, experiment)
    else:
        yield from _step_faults_of_axis(axis, workload, experiment, [trial for _, trial in applied])
    yield from _evaluation_faults(workload, experiment)
    yield from _reading_faults(workload, experiment)
    yield from _learning_rate_faults(workload, experiment)


def _batch_faults(
    trial: TrialRequest, workload: WorkloadRequest, experiment: Experiment
) -> Iterator[str]:
    """Yield why a batch or a model cannot be divided; where cores decide, the plan checks it."""
    if workload.script is not None:
        yield from _script_trial_faults(trial)
        return
    for key in ("arguments", "environment"):
        if getattr(trial, key):
            yield f"{key}: expected only with a script, and {workload.name} is none; remove it"
    counts = counts_if_known(trial)
    if counts is None:
        return
    strategy, defaults = STRATEGIES.get(trial.local_strategy), workload_of(workload)
    for batch in _known_batches(trial, workload, experiment):
        try:
            share = batch_per_replica(batch, trial.nodes * counts.replicas)
        except UsageError as error:
            yield str(error)
            continue
        yield from strategy.batch_faults(trial, counts, share, defaults)


def _known_batches(
    trial: TrialRequest, workload: WorkloadRequest, experiment: Experiment
) -> tuple[int, ...]:
    """Return the global batches with which a trial trains a workload, as far as they are known.

    With a batch for each replica, that of a trial whose replicas the cores give is not.
    """
    axis = batch_axis(workload, experiment)
    if axis is None:
        given = first_given("global_batch", workload, experiment)
        return (given or workload_of(workload).global_batch,)
    if axis.per_replica is None:
        return axis.batches
    counts = counts_if_known(trial)
    return () if counts is None else (axis.per_replica * trial.nodes * counts.replicas,)


def _step_faults(workload: WorkloadRequest, experiment: Experiment) -> Iterator[str]:
    """Yield a warm-up that leaves no step to measure."""
    steps = known_steps(workload, experiment)
    warmup = first_given("warmup_steps", workload, experiment)
    if steps is not None and warmup is not None and warmup >= steps:
        yield (
            f"workload {workload.name}: warmup_steps = {warmup} leaves nothing to measure of "
            f"{steps} steps; use at most {steps - 1}, or train longer (max_steps, epochs)"
        )


def _step_faults_of_axis(
    axis: BatchAxis,
    workload: WorkloadRequest,
    experiment: Experiment,
    trials: Iterable[TrialRequest],
) -> list[str]:
    """Return the same for each global batch that is known; equal faults once."""
    batches = {*axis.batches, *(() if axis.per_replica is None else (axis.per_replica,))}
    for trial in trials:
        batches.update(_known_batches(trial, workload, experiment))
    return list(
        dict.fromkeys(
            fault
            for batch in sorted(batches)
            for fault in _step_faults(with_global_batch(workload, batch), experiment)
        )
    )


def _learning_rate_faults(workload: WorkloadRequest, experiment: Experiment) -> Iterator[str]:
    """Yield a reference batch that nothing uses."""
    scaling = first_given("learning_rate_scaling", workload, experiment) or "none"
    reference = first_given("reference_batch", workload, experiment)
    if scaling == "none" and reference is not None:
        yield (
            f"workload {workload.name}: reference_batch has no effect without scaling; add "
            'learning_rate_scaling = "linear" or "sqrt", or remove it'
        )


def _evaluation_faults(workload: WorkloadRequest, experiment: Experiment) -> Iterator[str]:
    """Yield keys of evaluations that do not go together."""
    if workload.script is not None:
        return
    given = {name: first_given(name, workload, experiment) for name in EVALUATION_KEYS}
    data = workload.held_out_data
    if data is not None and given["held_out_samples"] is not None:
        yield (
            f"workload {workload.name}: expected held_out_data or held_out_samples, got both; "
            "evaluations use one of them"
        )
    if data is not None and workload.data is None and reads_dataset(workload):
        yield (
            f"workload {workload.name}: held_out_data needs data to train on; add data, or use "
            "held_out_samples"
        )
    if data is None and given["held_out_samples"] is None:
        for name in (name for name, value in given.items() if value is not None):
            yield (
                f"workload {workload.name}: {name} needs samples to evaluate on; add "
                "held_out_samples or held_out_data, or remove it"
            )
    elif given["evaluate_every_steps"] is not None and given["evaluate_every_epochs"] is not None:
        yield (
            f"workload {workload.name}: expected evaluate_every_steps or evaluate_every_epochs, "
            "got both"
        )


def _reading_faults(workload: WorkloadRequest, experiment: Experiment) -> Iterator[str]:
    """Yield a cold start where there are no files that leave the memory."""
    if workload.script is not None or first_given("reading", workload, experiment) != "cold":
        return
    where = f'workload {workload.name}: reading = "cold" expected a data set in a folder'
    if not reads_dataset(workload):
        yield f'{where}, got samples that the task makes; add data, or use "stream"'
    elif workload.data is not None and is_remote(workload.data):
        yield f'{where}, got {workload.data}; use "stream" without cache'


# --- scripts --------------------------------------------------------------------------------------


def _script_faults(workload: WorkloadRequest, experiment: Experiment, place: str) -> Iterator[str]:
    """Yield faults of a [[workloads]] entry that concern a script; `place` names the entry."""
    if workload.script is None:
        for key in ("module", "arguments", "samples_per_step"):
            if getattr(workload, key):
                yield f'{place}.{key}: belongs to a script; add script = "FILE.py", or remove it'
        return
    if workload.name in WORKLOADS:
        yield (
            f'{place}.name: "{workload.name}" is a built-in workload; give the script another name'
        )
    of_tasks = ("data", "held_out_data", "samples", "task", "options")
    yield from _decided_by_script(workload, (*_OF_BUILT_IN_TRAININGS, *of_tasks), place)
    if all(each.script is not None for each in experiment.workloads):
        yield from _decided_by_script(experiment.training, _OF_BUILT_IN_TRAININGS, "training")
    if experiment.tune is not None:
        yield "tune: searches are for built-in workloads, got a script; remove [tune]"


def _script_trial_faults(trial: TrialRequest) -> Iterator[str]:
    """Yield why a trial without other faults cannot run a script."""
    strategy = strategy_of(trial)
    if strategy is None or not strategy.runs_scripts:
        able = tuple(each.name for each in STRATEGIES.all() if each.runs_scripts)
        yield (
            f"local_strategy: a script has one model per process; use {quoted(able)}, got "
            f'"{trial.local_strategy}"'
        )
        return
    name = transport_of(trial)
    transport = TRANSPORTS.get(name) if name is not None else None
    if transport is None or (transport.joins_ranks and not transport.serves_scripts):
        able = tuple(each.name for each in TRANSPORTS.all() if each.serves_scripts)
        yield f'transport: a script needs a process group; use {quoted(able)}, got "{name}"'
        return
    for variable in trial.environment:
        if variable.startswith(_OWN_VARIABLES):
            yield f"environment.{variable}: Paceline sets it; use threads_per_rank, or remove it"
    own = {*TRIAL_VALUES, *strategy.keys_of_own_training, *transport.keys_of_own_training}
    yield from _decided_by_script(trial, sorted(own & trial.model_fields_set), "")


def _decided_by_script(values: object, keys: Iterable[str], place: str) -> Iterator[str]:
    for key in keys:
        if getattr(values, key) is not None:
            where = f"{place}.{key}" if place else key
            yield f"{where}: a script decides this itself; remove it"


# --- [tune] ---------------------------------------------------------------------------------------


def _tune_faults(experiment: Experiment) -> Iterator[str]:
    """Yield unknown names, and lists of [tune] that no trial of the spec can use."""
    tune = experiment.tune
    if tune is None:
        return
    for workload in experiment.workloads:
        if (fault := unsearched_batch_fault(workload, experiment)) is not None:
            yield f"tune: {fault}"
    for place, name in enumerate(tune.strategies or (), start=1):
        if name not in STRATEGIES:
            yield STRATEGIES.unknown(name, f"tune.strategies[{place}]")
    for list_key, key in _LISTS.items():
        values = getattr(tune, list_key)
        if not values:
            continue
        able = [trial for trial in experiment.trials if _can_use(trial, key, values)]
        if not able:
            yield (
                f"tune.{list_key}: expected a trial that can use {key}, found none; remove the list"
            )
        elif key in _NAMES:
            yield from _value_faults(able[0], key, list_key, values)


def unsearched_batch_fault(workload: WorkloadRequest, experiment: Experiment) -> str | None:
    """Return why no search can tune the trials of a workload; None if one can."""
    axis = batch_axis(workload, experiment)
    if axis is None:
        return None
    return (
        "a search compares settings that train one global batch, expected a number as "
        f"global_batch of workload {workload.name}, got {axis.words}; search with one batch, then "
        "copy the winners into the spec with several"
    )


def _can_use(request: TrialRequest, key: str, values: Sequence[Any]) -> bool:
    """Return whether the key has a meaning for the trial."""
    transport = transport_of(request)
    if transport is None or not has_peers(request) or not accepts(request, key):
        return False
    numbers = [value for value in values if value not in ("model", "unbounded")]
    tried = request.model_copy(update={key: numbers[0] if numbers else 1})
    faults = TRANSPORTS.get(transport).key_faults(tried)
    return not any(fault.startswith(f"{key}:") for fault in faults)


def _value_faults(
    request: TrialRequest, key: str, list_key: str, values: Sequence[str]
) -> Iterator[str]:
    """Yield values that the key cannot have."""
    for place, value in enumerate(values, start=1):
        tried = request.model_copy(update={key: value})
        for fault in (*name_faults(tried), *key_faults(tried)):
            if fault.startswith(f"{key}:"):
                yield f"tune.{list_key}[{place}]{fault.removeprefix(key)}"


# --- secrets --------------------------------------------------------------------------------------


def _secret_faults(experiment: Experiment) -> Iterator[str]:
    """Yield why a spec must not hold a value; the value itself is not repeated."""
    for place, workload in enumerate(experiment.workloads, start=1):
        for key in ("data", "held_out_data"):
            name = getattr(workload, key)
            if name is not None and holds_secret(name):
                yield (
                    f"workloads[{place}].{key}: a URL must not contain a secret, because it is "
                    "written to the run directory; expected a URL without user, password and "
                    "keys: set the variables of the storage instead (AWS_SECRET_ACCESS_KEY, "
                    "GOOGLE_APPLICATION_CREDENTIALS)"
                )
    tables = {"description": experiment.description, **(experiment.model_extra or {})}
    for place, trial in enumerate(experiment.trials, start=1):
        own = {"arguments": trial.arguments, "environment": trial.environment}
        tables[f"trials[{place}]"] = {**own, **(trial.model_extra or {})}
    for where, is_secret in unrecorded_settings(tables):
        what = "a secret" if is_secret else "a long value under a name that Paceline does not know"
        yield (
            f"{where}: a spec must not contain {what}, because it is written to the run directory "
            "and to every node; remove it, and set it where Paceline does not read it: "
            "spark-defaults.conf in the folder $SPARK_CONF_DIR, or an environment variable"
        )
