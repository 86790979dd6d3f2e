"""The predicted disk use of a plan, and the warning where the disk has less free."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from typing import TYPE_CHECKING

from paceline.data.dataset import open_dataset
from paceline.errors import DataError, EnvironmentLacks, PacelineWarning
from paceline.plan.trial import task_facts
from paceline.runner.disk_use import DiskUse, Sizes, run_disk_use, trial_disk_use
from paceline.spec.workloads import workload_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.plan.trial import Training
    from paceline.runner.planning import Planned

# Weights, gradients and momentum of a training fit into memory.
_TENSORS_IN_MEMORY = 3
_COPIES_OF_SGD, _COPIES_OF_OTHERS = 1, 2  # Adam and its relatives have two

Parameters = tuple[int, int]  # bytes of all, and tensors of the optimiser for each


def predicted_disk_use(planned: Planned) -> DiskUse:
    """Return the disk use of the run; asks for facts of the models, 1 to 2 s for each."""
    return _predicted(planned, _parameters)


def warn_of_small_disk(planned: Planned, folder: Path) -> None:
    """Warn if the disk of a folder has less free than the run may need.

    The facts of the models, which take 1 to 2 s, are asked for only where models as large as the
    memory would not fit.
    """
    free = shutil.disk_usage(folder).free
    trial_s = max(trial.limits.trial_s for trial in planned.trials)
    if _predicted(planned, _largest_parameters).peak_bytes(trial_s) <= free:
        return
    needed = predicted_disk_use(planned).peak_bytes(trial_s)
    if needed > free:
        message = (
            f"{folder}: the run may need {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free; "
            "free some, choose another disk with --out, or write fewer checkpoints and tensors"
        )
        warnings.warn(message, PacelineWarning, stacklevel=2)


def _predicted(planned: Planned, parameters: Callable[[Training], Parameters]) -> DiskUse:
    sizes: dict[str, Sizes] = {}
    with_baseline: set[tuple[str, int, str]] = set()
    found = []
    for trial in planned.trials:
        training = trial.training
        if training.workload not in sizes:
            sizes[training.workload] = _sizes(
                training, _samples(planned, training), parameters(training)
            )
        key = (training.workload, training.seed, training.precision)
        is_first_baseline = trial.is_baseline and key not in with_baseline
        if is_first_baseline:
            with_baseline.add(key)
        keeps = planned.experiment.keep_tensors or is_first_baseline
        found.append(trial_disk_use(trial, sizes[training.workload], keeps_tensors=keeps))
    return run_disk_use(found, len({trial.configuration for trial in planned.trials}))


def _sizes(training: Training, samples: int, parameters: Parameters) -> Sizes:
    steps = training.max_steps or 0  # a script decides itself when it ends
    if samples:
        steps = math.ceil(samples / training.global_batch) * training.epochs
        steps = min(steps, training.max_steps or steps)
    return Sizes(
        steps=steps,
        samples=samples,
        parameter_bytes=parameters[0],
        optimizer_copies=parameters[1],
    )


def _samples(planned: Planned, training: Training) -> int:
    """Return the number of samples to train on; 0 if it is not known."""
    [workload] = [w for w in planned.experiment.workloads if w.name == training.workload]
    if workload.script is not None:
        return 0
    known = workload_of(workload)
    if workload.data is None and not known.own_samples:
        return workload.samples or known.samples
    if workload.data is None:
        samples = known.facts().items or 0
    else:
        try:
            samples = open_dataset(planned.datasets[workload.name]).samples
        except (EnvironmentLacks, DataError):
            return 0  # the run itself reports it
    held_out = training.evaluation.held_out_samples if training.evaluation is not None else 0
    return max(1, samples - held_out)


def _parameters(training: Training) -> Parameters:
    if training.script is not None:
        return 0, 0
    facts = task_facts(training)
    copies = _COPIES_OF_SGD if facts.optimizer == "SGD" else _COPIES_OF_OTHERS
    return facts.parameter_bytes, copies


def _largest_parameters(training: Training) -> Parameters:
    """Return those of the largest model that can be trained in the memory of this host."""
    if training.script is not None:
        return 0, 0
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_bytes // _TENSORS_IN_MEMORY, _COPIES_OF_OTHERS
