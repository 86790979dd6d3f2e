"""Launcher `torchrun` under schedulers."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from paceline.launchers.torchrun.launcher import ENVIRONMENT, agent_arguments
from paceline.render.kubernetes import single_pod_job
from paceline.render.slurm import SlurmStep

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.render.kubernetes import KubernetesSettings
    from paceline.render.slurm import SlurmSettings

_MODULE = ["-m", "paceline.launchers.torchrun"]


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task, torchrun's agent, that starts all ranks."""
    job_id = "$SLURM_JOB_ID"
    agent = agent_arguments(trial, job_id, f"/tmp/paceline-{job_id}.rendezvous")  # noqa: S108
    # Unquoted: the shell has to replace the job's number.
    command = " ".join([shlex.quote(settings.python), *agent, *_MODULE])
    return SlurmStep(
        command=command, cpus_per_task=trial.placement.cores_per_node, environment=ENVIRONMENT
    )


def kubernetes_object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    agent = agent_arguments(trial, "paceline", "/tmp/paceline.rendezvous")  # noqa: S108
    return single_pod_job([*agent, *_MODULE], trial, settings)
