"""Ask the memory model, which needs torch, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import TimedOut, UsageError
from paceline.host.programs import why_it_failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial

MIB = 2**20
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predicted peak memory of the ranks of a node for a global batch, in bytes."""

    global_batch: int
    ranks: list[int]  # private memory of each rank
    shared: int

    @property
    def total(self) -> int:
        return sum(self.ranks) + self.shared


def predict_memory(trial: Trial, batches: Sequence[int]) -> list[Predicted]:
    """Return the prediction for each global batch.

    Raises UsageError if there is no model for the trial, TimedOut after 300 s.
    """
    question = {"trial": trial.model_dump(mode="json"), "batches": list(batches)}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "paceline.worker.memory"], env=environment,
            input=json.dumps(question), capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimedOut(
            f"{trial.configuration}: expected a prediction of its memory within "
            f"{_TIMEOUT_S:.0f} s, got none; is the machine overloaded?"
        ) from None
    if done.returncode != 0:
        raise UsageError(
            f"{trial.configuration}: its memory cannot be predicted: {why_it_failed(done)}"
        )
    return [Predicted(**each) for each in json.loads(done.stdout)]


def rank_limit_mib(predicted: Predicted, bound: int) -> int:
    """Return the limit of each rank: its part of what the shared memory leaves of the bound."""
    room = max(0, bound - predicted.shared)
    return max(1, room * max(predicted.ranks) // sum(predicted.ranks) // MIB)


def batch_that_fits(low: Predicted, high: Predicted, bytes_available: int) -> int:
    """Return the largest batch on the line through two predictions; 0 if none fits."""
    per_sample = (high.total - low.total) / (high.global_batch - low.global_batch)
    room = bytes_available - low.total
    if per_sample <= 0:
        return high.global_batch if room >= 0 else 0
    return max(0, low.global_batch + int(room // per_sample))
