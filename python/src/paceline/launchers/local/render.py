"""Launcher `local` under schedulers."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from paceline.render.kubernetes import single_pod_job
from paceline.render.slurm import SlurmStep

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.render.kubernetes import KubernetesSettings
    from paceline.render.slurm import SlurmSettings

_MODULE = ["-m", "paceline.launchers.local"]


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task that starts all ranks."""
    command = shlex.join([settings.python, *_MODULE])
    return SlurmStep(command=command, cpus_per_task=trial.placement.cores_per_node)


def kubernetes_object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    return single_pod_job(_MODULE, trial, settings)
