"""Local strategies: how a node's share of a batch becomes an averaged gradient, by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.training.strategy import GradientResult, LocalStrategy, TrainBatch, WeightAveraging

if TYPE_CHECKING:
    from paceline.plan.trial import Trial

__all__ = ["GradientResult", "LocalStrategy", "TrainBatch", "WeightAveraging", "create_strategy"]

# Module and class, imported when asked for: each run needs one of them.
_REPLICA = ("replica", "ReplicaStrategy")
_THREADS = ("threads.strategy", "ThreadsStrategy")
_PROCESSES = ("processes.strategy", "ProcessesStrategy")
_PIPELINE = ("pipeline.strategy", "PipelineStrategy")
_LOCAL_SGD = ("local_sgd.strategy", "LocalSgdStrategy")
_STRATEGIES = {
    "sequential": _REPLICA,
    "intraop": _REPLICA,
    "threads": _THREADS,
    "processes": _PROCESSES,
    "pipeline": _PIPELINE,
    "hybrid": _PIPELINE,
}


def create_strategy(trial: Trial) -> LocalStrategy:
    """The trial's strategy, not yet prepared. Raises UsageError for an unknown name."""
    name = trial.local_strategy
    if name not in _STRATEGIES:
        raise UsageError(f"local strategy {name!r}: expected one of {', '.join(_STRATEGIES)}")
    module, kind = _STRATEGIES[name]
    if name == "processes" and not reduces_in_shared_memory(trial):
        module, kind = _REPLICA
    if trial.averaging is not None:
        module, kind = _LOCAL_SGD
    strategy: LocalStrategy = getattr(import_module(f"{__name__}.{module}"), kind)()
    return strategy


def reduces_in_shared_memory(trial: Trial) -> bool:
    """Whether the processes of a node sum their gradients in memory that they share."""
    return trial.transport == "shared" or trial.reduction == "hierarchical"
