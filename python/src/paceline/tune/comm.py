"""`paceline tune comm`: search for the fastest communication settings, trial by trial.

Keys that a trial of the spec sets itself are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline.errors import EnvironmentLacks
from paceline.launchers.mpi.descriptor import MpiSettings
from paceline.launchers.mpi.tools import find_mpirun, unknown_parameters
from paceline.plan.trial import Trial
from paceline.runner import Progress
from paceline.spec import Experiment, Spec, TrialRequest, TuneSettings, WorkloadRequest
from paceline.spec.trial_rules import applies
from paceline.tune.comm_choices import (
    algorithm_choices,
    bucket_choices,
    compression_choices,
    parameter_choices,
    why_left_alone,
    with_communication,
)
from paceline.tune.findings import Findings
from paceline.tune.method import Choices, Searched
from paceline.tune.session import run_search
from paceline.tune.spaces import SearchContext, Target, changed

if TYPE_CHECKING:
    Keys = dict[str, Any]  # of a [[trials]] entry
    Options = Callable[[TrialRequest, Trial, TuneSettings], list[Keys]]


def _round(options: Options) -> Choices:
    def requests(
        searched: Searched, reached: Trial | None, context: SearchContext
    ) -> list[TrialRequest]:
        if reached is None:
            return []
        present = with_communication(searched.request, reached)
        found = options(searched.request, reached, context.settings)
        # another Open MPI may lack some of the parameters that are tried by default
        return [
            changed(present, **keys)
            for keys in found
            if _unknown(keys.get("mpi_parameters"), context) is None
        ]

    return requests


class CommSearch:
    """Targets are trials of the spec on a workload."""

    command = "tune comm"
    compares_targets = False
    rounds: Mapping[str, Choices] = MappingProxyType(
        {
            "buckets": _round(bucket_choices),
            "compression": _round(compression_choices),
            "algorithm": _round(algorithm_choices),
            "parameters": _round(parameter_choices),
        }
    )

    def searched(self, context: SearchContext) -> list[Searched]:
        """Return every trial but the baselines.

        Raises EnvironmentLacks if [tune] contains a parameter that this MPI does not know.
        """
        for parameters in context.settings.mpi_parameters or ():
            unknown = _unknown(parameters, context)
            if unknown is not None:
                raise EnvironmentLacks(f"tune.mpi_parameters: {unknown}")
        return [
            Searched(
                target=Target(workload=workload.name, name=f"trials[{place}]"),
                request=request,
                not_searched=why_left_alone(request),
            )
            for workload in context.short.workloads
            for place, request in enumerate(context.experiment.trials, start=1)
            if applies(request, workload) and not request.is_baseline
        ]

    def present(self, request: TrialRequest, reached: Trial) -> TrialRequest:
        return with_communication(request, reached)

    def filled_in(
        self,
        request: TrialRequest,
        workload: WorkloadRequest,
        experiment: Experiment,
        findings: Findings,
    ) -> TrialRequest | None:
        place = experiment.trials.index(request) + 1
        found = findings.of(Target(workload=workload.name, name=f"trials[{place}]"))
        if found is None or found.chosen is None or found.chosen == found.default:
            return request
        return with_communication(request, found.chosen)


def tune_comm(
    spec: Spec, run_dir: Path, *, resume: bool, progress: Progress, budget_s: float | None = None
) -> Findings:
    """Search into `run_dir`; see `session.run_search`."""
    return run_search(
        CommSearch(), spec, run_dir, resume=resume, progress=progress, budget_s=budget_s
    )


def _unknown(parameters: Mapping[str, str] | None, context: SearchContext) -> str | None:
    """Return which of the parameters this MPI would ignore silently, as text."""
    if not parameters:
        return None
    return unknown_parameters(
        parameters, find_mpirun(context.experiment.settings("mpi", MpiSettings).mpirun).path
    )
