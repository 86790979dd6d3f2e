"""`paceline tune batch`: the largest batch that fits into memory, and speed over batch sizes."""

from paceline.tune.batch.search import BatchFinding, tune_batch

__all__ = ["BatchFinding", "tune_batch"]
