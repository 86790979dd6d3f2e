"""`paceline tune local`: search for the fastest settings of each local strategy on this node."""

from paceline.tune.local.method import LocalSearch, plan_local, tune_local

__all__ = ["LocalSearch", "plan_local", "tune_local"]
