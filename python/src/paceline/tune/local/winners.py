"""Spec keys of a local strategy's winner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plan.planning import resolve_training
from paceline.spec.counts import batch_per_replica
from paceline.spec.tune_rules import has_layout
from paceline.spec.values import BEST
from paceline.tune.spaces import Target, changed

if TYPE_CHECKING:
    from paceline.spec import Experiment, TrialRequest, WorkloadRequest
    from paceline.tune.findings import Findings


def with_layout(
    request: TrialRequest, workload: WorkloadRequest, experiment: Experiment, findings: Findings
) -> TrialRequest | None:
    """Return the trial with its strategy's winner, or with the best strategy; None if there is
    none."""
    if request.local_strategy == BEST:
        found = findings.best(workload.name)
        if found is None:
            return None
    else:
        found = findings.of(Target(workload=workload.name, name=request.local_strategy))
    chosen = None if found is None else found.chosen
    if chosen is None or has_layout(request):
        return request
    layout = chosen.layout_keys
    if "micro_batches" in layout:
        batch = resolve_training(experiment, workload, "").global_batch
        share = batch_per_replica(batch, request.nodes * chosen.placement.replicas_per_node)
        layout["micro_batches"] = min(layout["micro_batches"], share)
    shares_cores = {"oversubscribe": True} if chosen.placement.oversubscribe else {}
    return changed(request, local_strategy=chosen.local_strategy, **layout, **shares_cores)
