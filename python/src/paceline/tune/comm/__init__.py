"""`paceline tune comm`: search for the fastest communication settings of each trial with peers."""

from paceline.tune.comm.method import CommFindings, CommSearch, tune_comm

__all__ = ["CommFindings", "CommSearch", "tune_comm"]
