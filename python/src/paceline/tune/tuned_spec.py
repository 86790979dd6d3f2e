"""The spec with a search's winners filled in as explicit numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tomli_w
from pydantic import BaseModel

from paceline.errors import UsageError
from paceline.host.machine import host_name
from paceline.plan.planning import plan_trials
from paceline.spec import Experiment, TrialRequest, WorkloadRequest
from paceline.spec.loading import AS_WRITTEN, parse_spec
from paceline.spec.trial_rules import applies
from paceline.tune.method import SearchMethod
from paceline.tune.spaces import changed

if TYPE_CHECKING:
    from paceline.tune.findings import Findings

_HEADER = """\
# {name} with what `paceline {command}` found on {host}, {cores} cores.
# A trial that is for some workloads only says so: their winners differ.

"""


def tuned_text(method: SearchMethod, experiment: Experiment, findings: Findings, cores: int) -> str:
    """Return the tuned spec as TOML. Raises UsageError if the winners do not form a valid spec.

    cores: number of cores of this node.
    """
    plain = experiment.model_dump(**AS_WRITTEN, exclude={"tune", "trials", "workloads"})
    text = _HEADER.format(
        name=experiment.name, command=method.command, host=host_name(), cores=cores
    )
    text += tomli_w.dumps(plain)
    for workload in experiment.workloads:
        text += _entry("workloads", workload)
    for request in tuned_requests(method, experiment, findings, cores):
        text += _entry("trials", request)
    parse_spec(text, "the tuned spec")
    return text


def tuned_requests(
    method: SearchMethod, experiment: Experiment, findings: Findings, cores: int
) -> list[TrialRequest]:
    """Return the trials with their winners; trials that are equal for several workloads are merged.

    Trials that become equal to an earlier one are left out, as is a trial of the best strategy if
    none could be measured. A workload's winner is added if no trial has its strategy.
    """
    wanted: dict[str, tuple[TrialRequest, list[WorkloadRequest]]] = {}
    planned: set[str] = set()
    for request in experiment.trials:
        for workload in (w for w in experiment.workloads if applies(request, w)):
            tuned = method.filled_in(request, workload, experiment, findings)
            if tuned is None:
                continue
            tuned = changed(tuned, workloads=None)
            name = _configuration(tuned, workload, experiment, cores)
            if name in planned:
                continue
            if name is not None:
                planned.add(name)
            wanted.setdefault(tuned.model_dump_json(), (tuned, []))[1].append(workload)
    for workload in experiment.workloads:
        best = findings.best(workload.name) if findings.compares_targets else None
        present = [tuned for tuned, workloads in wanted.values() if workload in workloads]
        if (
            best is not None
            and best.chosen is not None
            and not any(tuned.local_strategy == best.target.name for tuned in present)
        ):
            alone = TrialRequest(launcher="local", local_strategy=best.target.name)
            winner = method.present(alone, best.chosen)
            wanted.setdefault(winner.model_dump_json(), (winner, []))[1].append(workload)
    return [
        _for_workloads(request, workloads, experiment) for request, workloads in wanted.values()
    ]


def _entry(name: str, table: BaseModel) -> str:
    """Return an entry of an array of tables; nested tables follow its plain values."""
    said = table.model_dump(**AS_WRITTEN)
    inner = {key: value for key, value in said.items() if isinstance(value, dict)}
    text = f"\n[[{name}]]\n" + tomli_w.dumps({k: v for k, v in said.items() if k not in inner})
    for key, value in inner.items():
        text += tomli_w.dumps({name: {key: value}})
    return text


def _configuration(
    request: TrialRequest, workload: WorkloadRequest, experiment: Experiment, cores: int
) -> str | None:
    """Return the planner's name; None if it cannot be planned, which the run reports."""
    one = experiment.model_copy(update={"workloads": (workload,), "trials": (request,)})
    try:
        return plan_trials(one, {workload.name: ""}, cores)[0].configuration
    except UsageError:
        return None


def _for_workloads(
    request: TrialRequest, workloads: list[WorkloadRequest], experiment: Experiment
) -> TrialRequest:
    if len(workloads) == len(experiment.workloads):
        return request
    return changed(request, workloads=tuple(w.name for w in workloads))
