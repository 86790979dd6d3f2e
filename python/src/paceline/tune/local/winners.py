"""Spec keys of a local strategy's winner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.plan.planning import resolve_training
from paceline.spec.counts import share_of
from paceline.spec.tune_rules import says_its_layout
from paceline.tune.spaces import Target, changed

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.spec import Experiment, TrialRequest, WorkloadRequest
    from paceline.tune.findings import Findings


def layout_of(trial: Trial) -> dict[str, Any]:
    """Return the keys of a [[trials]] entry, besides the strategy, that mean this trial."""
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
    cut = (
        {"balance": pipeline.balance}
        if pipeline.split_points is None
        else {"split_points": pipeline.split_points}
    )
    return {
        **({"replicas": trial.replicas_per_node} if hybrid else {}),
        "stages": pipeline.stages,
        **threads,
        "micro_batches": pipeline.micro_batches,
        "schedule": pipeline.schedule,
        **cut,
    }


def with_layout(
    request: TrialRequest, workload: WorkloadRequest, experiment: Experiment, findings: Findings
) -> TrialRequest | None:
    """Return the trial with its strategy's winner, or with the best strategy; None if there is
    none."""
    if request.local_strategy == "best":
        found = findings.best(workload.name)
        if found is None:
            return None
    else:
        found = findings.of(Target(workload=workload.name, name=request.local_strategy))
    chosen = None if found is None else found.chosen
    if chosen is None or says_its_layout(request):
        return request
    layout = layout_of(chosen)
    if "micro_batches" in layout:
        batch = resolve_training(experiment, workload, "").global_batch
        share = share_of(batch, request.nodes * chosen.replicas_per_node)
        layout["micro_batches"] = min(layout["micro_batches"], share)
    shares_cores = {"oversubscribe": True} if chosen.placement.oversubscribe else {}
    return changed(request, local_strategy=chosen.local_strategy, **layout, **shares_cores)
