"""What is being run, as the labels of `paceline_run_info` say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.plan.trial import Trial


def facts_of(trial: Trial) -> dict[str, str]:
    """By label, in the order of catalogue.RUN_FACTS."""
    return {
        "trial": trial.id,
        "workload": trial.training.workload,
        "launcher": trial.launcher,
        "transport": trial.transport,
        "local_strategy": trial.local_strategy,
        "nodes": str(trial.placement.nodes),
        "ranks": str(trial.placement.ranks),
        "repeat": str(trial.repeat),
    }
