"""The spec with a search's winners filled in, as explicit numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tomli_w

from paceline.errors import UsageError
from paceline.plan.planning import plan_trials, resolve_training
from paceline.records.machine import host_name
from paceline.spec.counts import share_of
from paceline.spec.loading import parse_spec
from paceline.spec.models import TrialRequest
from paceline.spec.trial_rules import applies
from paceline.spec.tune_rules import says_its_layout

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.spec import Experiment, WorkloadRequest
    from paceline.tune.findings import Findings

_HEADER = """\
# {name} with what `paceline tune local` found on {host}, {cores} cores.
# A trial that is for some workloads only says so: their winners differ.

"""
# what a spec said, under the names that it says it by
_AS_WRITTEN: dict[str, Any] = {
    "mode": "json",
    "by_alias": True,
    "exclude_unset": True,
    "exclude_none": True,
}


def tuned_text(experiment: Experiment, findings: Findings, cores: int) -> str:
    """The tuned spec as TOML. Raises UsageError if the winners make no valid spec.

    cores: of this node, that were searched.
    """
    plain = experiment.model_dump(**_AS_WRITTEN, exclude={"tune", "trials", "workloads"})
    header = _HEADER.format(name=experiment.name, host=host_name(), cores=cores)
    requests = tuned_requests(experiment, findings, cores)
    tables = [
        *(("[[workloads]]", workload) for workload in experiment.workloads),
        *(("[[trials]]", request) for request in requests),
    ]
    text = header + tomli_w.dumps(plain)
    for name, table in tables:
        text += f"\n{name}\n{tomli_w.dumps(table.model_dump(**_AS_WRITTEN))}"
    parse_spec(text, "the tuned spec")
    return text


def tuned_requests(experiment: Experiment, findings: Findings, cores: int) -> list[TrialRequest]:
    """The trials with their winners; those that are equal for several workloads stay one.

    What becomes the same as an earlier trial is left out, as is a trial of the best strategy where
    none could be measured.
    """
    wanted: dict[str, tuple[TrialRequest, list[WorkloadRequest]]] = {}
    planned: set[str] = set()
    for request in experiment.trials:
        for workload in (w for w in experiment.workloads if applies(request, w)):
            tuned = _tuned(request, workload, experiment, findings)
            name = None if tuned is None else _configuration(tuned, workload, experiment, cores)
            if tuned is None or name in planned:
                continue
            if name is not None:
                planned.add(name)
            wanted.setdefault(tuned.model_dump_json(), (tuned, []))[1].append(workload)
    return [
        _for_workloads(request, workloads, experiment) for request, workloads in wanted.values()
    ]


def layout_of(trial: Trial) -> dict[str, Any]:
    """The keys of a [[trials]] entry, beside the strategy, that mean this very trial."""
    place, pipeline = trial.placement, trial.pipeline
    threads = {"threads_per_rank": place.threads_per_rank}
    if trial.local_strategy == "sequential":
        return {}
    if trial.local_strategy == "threads":
        return {"replicas": trial.thread_replicas, **threads}
    if trial.local_strategy == "processes":
        return {"ranks_per_node": place.ranks_per_node, **threads}
    if pipeline is None:
        return threads
    hybrid = trial.local_strategy == "hybrid"
    cut = {"balance": pipeline.balance} if pipeline.cuts is None else {"cuts": pipeline.cuts}
    return {
        **({"replicas": trial.replicas_per_node} if hybrid else {}),
        "stages": pipeline.stages,
        **threads,
        "micro_batches": pipeline.micro_batches,
        "schedule": pipeline.schedule,
        **cut,
    }


def _tuned(
    request: TrialRequest, workload: WorkloadRequest, experiment: Experiment, findings: Findings
) -> TrialRequest | None:
    plain = _changed(request, workloads=None)
    if request.local_strategy == "best":
        found = findings.best(workload.name)
        if found is None:
            return None
    else:
        found = findings.of(workload.name, request.local_strategy)
    chosen = None if found is None else found.chosen
    if chosen is None or says_its_layout(request):
        return plain
    layout = layout_of(chosen)
    if "micro_batches" in layout:
        batch = resolve_training(experiment, workload, "").global_batch
        share = share_of(batch, request.nodes * chosen.replicas_per_node)
        layout["micro_batches"] = min(layout["micro_batches"], share)
    shares_cores = {"oversubscribe": True} if chosen.placement.oversubscribe else {}
    return _changed(plain, local_strategy=chosen.local_strategy, **layout, **shares_cores)


def _configuration(
    request: TrialRequest, workload: WorkloadRequest, experiment: Experiment, cores: int
) -> str | None:
    """What the planner calls it; None if it cannot be planned, which a run then says."""
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
    return _changed(request, workloads=tuple(w.name for w in workloads))


def _changed(request: TrialRequest, **values: Any) -> TrialRequest:
    """A validated copy; None takes a key away."""
    said = {**request.model_dump(exclude_unset=True), **values}
    return TrialRequest.model_validate({k: v for k, v in said.items() if v is not None})
