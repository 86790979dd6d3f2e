"""Local strategies: how a node's share of a batch becomes an averaged gradient, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.train.strategies.base import GradientResult, LocalStrategy, TrainBatch
from paceline.train.strategies.replica import ReplicaStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.spec.values import LocalStrategy as StrategyName

__all__ = ["GradientResult", "LocalStrategy", "TrainBatch", "create_strategy"]

# One replica a rank serves these three: they differ in how many ranks and threads there are.
_STRATEGIES: dict[StrategyName, Callable[[], LocalStrategy]] = {
    "sequential": ReplicaStrategy,
    "intraop": ReplicaStrategy,
    "processes": ReplicaStrategy,
}


def create_strategy(name: StrategyName) -> LocalStrategy:
    """The strategy, not yet prepared. Raises UsageError for an unknown name."""
    if name not in _STRATEGIES:
        raise UsageError(f"local strategy {name!r}: expected one of {', '.join(_STRATEGIES)}")
    return _STRATEGIES[name]()
