"""The search for each local strategy's fastest counts, schedule and cut on this node."""

from paceline.tune.local.method import LocalSearch, plan_local, tune_local

__all__ = ["LocalSearch", "plan_local", "tune_local"]
