"""`local`: start ranks on this node with `python -m paceline.runner.launchers.local`.

The same program runs under schedulers.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

from paceline.measure.records.layout import TrialFiles
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import rank_environment
from paceline.runner.launchers.base import Command, shared_memory_of_mpi
from paceline.runner.launchers.schedulers.kubernetes import KubernetesSettings, single_pod_job
from paceline.runner.launchers.schedulers.slurm import SlurmSettings, SlurmStep
from paceline.runner.preflight.this_host import check_trial

_MODULE = ["-m", "paceline.runner.launchers.local"]


class LocalLauncher:
    """Starts plain processes on one node, as a user would by hand."""

    def preflight(self, trial: Trial) -> None:
        check_trial(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        argv = (
            sys.executable,
            "-m",
            "paceline.runner.launchers.local",
            "--trial",
            str(files.trial),
        )
        return Command(
            argv=argv, environment=rank_environment(trial), temporary=shared_memory_of_mpi
        )

    def failed_rank(self, log_text: str) -> int | None:  # noqa: ARG002
        return None  # the job side reports it


def slurm_step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return one task that starts all ranks."""
    command = shlex.join([settings.python, *_MODULE])
    return SlurmStep(command=command, cpus_per_task=trial.placement.cores_per_node)


def kubernetes_object(trial: Trial, settings: KubernetesSettings) -> dict[str, Any]:
    return single_pod_job(_MODULE, trial, settings)
