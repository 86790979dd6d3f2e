"""The number of steps that a training will have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.data.dataset import open_dataset
from paceline.errors import DataError, EnvironmentLacks
from paceline.spec.workloads import workload_of

if TYPE_CHECKING:
    from paceline.plan.trial import Training
    from paceline.runner.planning import Planned


def known_samples(planned: Planned, training: Training) -> int | None:
    """Return the number of samples to train on; None if it is not known.

    A data set that cannot be read has no number: making the data sets reports it.
    """
    [workload] = [w for w in planned.experiment.workloads if w.name == training.workload]
    if workload.script is not None:
        return None
    known = workload_of(workload)
    if workload.data is None and not known.own_samples:
        return workload.samples or known.samples
    if workload.data is None:
        samples = known.facts().items
    else:
        try:
            samples = open_dataset(planned.datasets[workload.name]).samples
        except (EnvironmentLacks, DataError):
            return None
    if samples is None:
        return None
    held_out = 0 if training.evaluation is None else training.evaluation.held_out_samples
    return max(0, samples - held_out)


def planned_steps(training: Training, samples: int | None) -> int | None:
    """Return the number of steps; None for a script, which decides itself when it ends."""
    if samples is None:
        return training.max_steps
    steps = math.ceil(samples / training.global_batch) * training.epochs
    return steps if training.max_steps is None else min(steps, training.max_steps)
