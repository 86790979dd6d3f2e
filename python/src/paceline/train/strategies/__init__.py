"""Local strategies: how a node's share of a batch becomes an averaged gradient."""

from __future__ import annotations

from paceline.plan.spec.extensions import STRATEGIES, load_object
from paceline.plan.trials.trial import Trial
from paceline.train.training.strategy import (
    GradientResult,
    LocalStrategy,
    StepCommunication,
    TrainBatch,
)

__all__ = ["GradientResult", "LocalStrategy", "StepCommunication", "TrainBatch", "create_strategy"]


def create_strategy(trial: Trial) -> LocalStrategy:
    """Return the trial's strategy, not yet prepared. Raises UsageError for an unknown name."""
    descriptor = STRATEGIES.get(trial.local_strategy)
    path = descriptor.implementation_for(trial.transport, trial.strategy_options)
    strategy: LocalStrategy = load_object(path)()
    return strategy
