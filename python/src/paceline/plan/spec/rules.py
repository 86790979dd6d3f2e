"""Check a whole spec: combinations that cannot work are refused with the reason.

Everything that is known without looking at a machine is checked here; preflight checks the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

from pydantic import ValidationError

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec.counts import batch_per_replica, counts_if_known
from paceline.plan.spec.extensions import LAUNCHERS, STRATEGIES, WORKLOADS
from paceline.plan.spec.models import Experiment, TrialRequest, WorkloadRequest, keys_of_tables
from paceline.plan.spec.secret_values import secret_faults
from paceline.plan.spec.sentences import no_such_key, sentences
from paceline.plan.spec.trial_rules import applies, are_counts_valid, trial_faults, tune_faults
from paceline.plan.spec.values import BASELINE, DEFAULT_EPOCHS, EVALUATION_KEYS, training_steps
from paceline.plan.spec.workloads import (
    reads_dataset,
    script_faults,
    script_trial_faults,
    workload_of,
)


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
    faults += secret_faults(experiment)
    faults += [] if skip else _baseline_faults(experiment)
    if experiment.only and experiment.tune is not None:
        faults.append(
            "only: the names of the configurations are known after the search of [tune] only; run "
            "`paceline tune local SPEC`, then `paceline run DIR/tuned.toml --only …`"
        )
    faults += _repeat_faults(experiment)
    faults += _failure_faults(experiment)
    faults += _duplicate_faults(trials)
    for place, workload in enumerate(experiment.workloads, start=1):
        where = f"workloads[{place}]"
        faults += script_faults(workload, experiment, where)
        unusable = list(_task_faults(workload, where))
        faults += unusable or _workload_faults(workload, experiment, trials)
    return faults + list(tune_faults(experiment))


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


def first_given(name: str, workload: WorkloadRequest, experiment: Experiment) -> Any:
    """Return a training value of the workload, else of [training], else None."""
    own = getattr(workload, name)
    return getattr(experiment.training, name) if own is None else own


def known_steps(workload: WorkloadRequest, experiment: Experiment) -> int | None:
    """Return the steps of the training; None if it depends on the data set."""
    limit = first_given("max_steps", workload, experiment)
    if workload.data is not None or workload.script is not None:
        return cast("int | None", limit)
    defaults = workload_of(workload)
    if reads_dataset(workload):
        samples = workload.samples or defaults.samples
    else:
        held_out = first_given("held_out_samples", workload, experiment) or 0
        samples = max(1, (defaults.facts().items or 1) - held_out)
    batch = first_given("global_batch", workload, experiment) or defaults.global_batch
    # without epochs, max_steps alone decides: an epoch has a step at least
    epochs = first_given("epochs", workload, experiment) or limit or DEFAULT_EPOCHS
    return training_steps(samples, batch, epochs, limit)


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
    for place, trial in trials:
        if applies(trial, workload) and are_counts_valid(trial):
            for fault in _batch_faults(trial, workload, experiment):
                yield f"trials[{place}]: workload {workload.name}: {fault}"
    yield from _step_faults(workload, experiment)
    yield from _evaluation_faults(workload, experiment)
    yield from _learning_rate_faults(workload, experiment)


def _batch_faults(
    trial: TrialRequest, workload: WorkloadRequest, experiment: Experiment
) -> Iterator[str]:
    """Yield why a batch or a model cannot be divided; where cores decide, the plan checks it."""
    if workload.script is not None:
        yield from script_trial_faults(trial)
        return
    for key in ("arguments", "environment"):
        if getattr(trial, key):
            yield f"{key}: expected only with a script, and {workload.name} is none; remove it"
    counts = counts_if_known(trial)
    if counts is None:
        return
    defaults = workload_of(workload)
    batch = first_given("global_batch", workload, experiment) or defaults.global_batch
    try:
        share = batch_per_replica(batch, trial.nodes * counts.replicas)
    except UsageError as error:
        yield str(error)
        return
    yield from STRATEGIES.get(trial.local_strategy).batch_faults(trial, counts, share, defaults)


def _step_faults(workload: WorkloadRequest, experiment: Experiment) -> Iterator[str]:
    """Yield a warm-up that leaves no step to measure."""
    steps = known_steps(workload, experiment)
    warmup = first_given("warmup_steps", workload, experiment)
    if steps is not None and warmup is not None and warmup >= steps:
        yield (
            f"workload {workload.name}: warmup_steps = {warmup} leaves nothing to measure of "
            f"{steps} steps; use at most {steps - 1}, or train longer (max_steps, epochs)"
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
    if given["held_out_samples"] is None:
        for name in (name for name, value in given.items() if value is not None):
            yield (
                f"workload {workload.name}: {name} needs samples to evaluate on; add "
                "held_out_samples, or remove it"
            )
    elif given["evaluate_every_steps"] is not None and given["evaluate_every_epochs"] is not None:
        yield (
            f"workload {workload.name}: expected evaluate_every_steps or evaluate_every_epochs, "
            "got both"
        )
