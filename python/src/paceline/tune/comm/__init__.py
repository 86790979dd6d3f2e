"""The search for the fastest way of communicating, for each trial with peers."""

from paceline.tune.comm.method import CommFindings, CommSearch, tune_comm

__all__ = ["CommFindings", "CommSearch", "tune_comm"]
