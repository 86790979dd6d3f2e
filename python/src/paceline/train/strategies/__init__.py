"""Local strategies: how a node's share of a batch becomes an averaged gradient.

One class trains by one mechanism. The descriptor of a strategy names its class, and `processes` has
three, by transport and options:

| mechanism | file | strategies |
|---|---|---|
| a replica per rank under DDP | `ddp.py` | `sequential`, `intraop`, flat `processes` |
| shards of shared memory | `shared_shards.py` | `processes` |
| own steps, then averaged weights | `local_sgd.py` | `processes` with `averaging_period_steps` |
| replicas in threads | `threads.py` | `threads` |
| unlocked updates | `hogwild.py` | `hogwild` |
| stages and micro-batches | `pipeline/` | `pipeline`, `hybrid` |
| divided parameters | `sharded/` | `sharded` |
| servers and workers | `parameter_server/` | `parameter-server` |

Parts that several of them use are in `reduction/`.
"""

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
