"""What goes together: combinations that cannot work are refused here, with the reason.

Everything that is known without looking at a machine is checked; the rest is preflight's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.spec.counts import check_micro_batches, counts_if_known, number, share_of
from paceline.spec.split_places import check_stages
from paceline.spec.trial_rules import applies, count_faults, trial_faults
from paceline.spec.tune_rules import tune_faults
from paceline.spec.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import Experiment, TrialRequest
    from paceline.spec.workloads import ModelName


def faults_of(experiment: Experiment) -> list[str]:
    """All faults, each a sentence with what was expected, what came and how to mend it."""
    faults = [
        f"trials[{place}]: {fault}"
        for place, trial in enumerate(experiment.trials, start=1)
        for fault in trial_faults(trial, experiment)
    ]
    faults += _baseline_faults(experiment)
    faults += _batch_faults(experiment)
    faults += _step_faults(experiment)
    faults += tune_faults(experiment)
    return faults


def _baseline_faults(experiment: Experiment) -> Iterator[str]:
    baselines = [
        t for t in experiment.trials if t.launcher == "local" and t.local_strategy == "sequential"
    ]
    lacking = [w.name for w in experiment.workloads if not any(applies(t, w) for t in baselines)]
    if lacking:
        of = f" of {', '.join(lacking)}" if baselines else ""
        yield (
            f'trials: expected the baseline{of} (launcher = "local", local_strategy = '
            '"sequential"), found none; every speedup is against it'
        )
    names = [t.model_dump_json() for t in experiment.trials]
    for place, name in enumerate(names, start=1):
        if name in names[: place - 1]:
            yield f"trials[{place}]: the same as an earlier one; use `repeats` to repeat"


def _batch_faults(experiment: Experiment) -> Iterator[str]:
    """Faults of a trial with a workload's batch and model."""
    for workload in experiment.workloads:
        batch = (
            workload.global_batch
            or experiment.training.global_batch
            or WORKLOADS[workload.name].global_batch
        )
        for place, trial in enumerate(experiment.trials, start=1):
            if not applies(trial, workload):
                continue
            for fault in _share_faults(trial, batch, WORKLOADS[workload.name].model):
                yield f"trials[{place}]: workload {workload.name}: {fault}"


def _share_faults(trial: TrialRequest, batch: int, model: ModelName) -> Iterator[str]:
    """Whether a batch and a model can be shared out; where the cores decide, the plan checks it."""
    counts = None if any(count_faults(trial)) else counts_if_known(trial)
    if counts is None:
        return
    try:
        share = share_of(batch, trial.nodes * counts.replicas)
        check_micro_batches(number(trial.micro_batches), share)
        check_stages(model, counts.stages, trial.split_points)
    except UsageError as error:
        yield str(error)


def _step_faults(experiment: Experiment) -> Iterator[str]:
    for workload in experiment.workloads:
        steps = workload.max_steps or experiment.training.max_steps
        given = (workload.warmup_steps, experiment.training.warmup_steps)
        warmup = next((w for w in given if w is not None), None)
        if steps is not None and warmup is not None and warmup >= steps:
            yield (
                f"workload {workload.name}: warmup_steps = {warmup} leaves nothing to measure of "
                f"max_steps = {steps}; use at most {steps - 1}"
            )
