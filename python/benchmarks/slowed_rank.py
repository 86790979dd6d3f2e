"""A job script with one rank slowed on purpose: a busy loop at the start of forward passes.

usage: … python slowed_rank.py RANK SECONDS EVERY SCRIPT ARGUMENTS…

EVERY: 1 slows every step, 2 those with odd numbers, and so on.

What a profile of such a run must say is known beforehand; see straggler.py and
tests/functional/test_profile.py.
"""

from __future__ import annotations

import itertools
import runpy
import sys
import time
from typing import Any

from paceline.train.rank import train as worker


def slow_down(slowed_rank: int, seconds: float, every: int) -> None:
    """From now on, for the rank that this process joins as."""
    training: Any = worker
    join_peers, checkpoint_activations = training.join_peers, training.checkpoint_activations
    rank = None

    def joined(context: Any, trial: Any) -> Any:
        nonlocal rank
        rank = context.rank
        return join_peers(context, trial)

    def checkpointed(task: Any, model: Any, trial: Any) -> None:  # called for each model
        checkpoint_activations(task, model, trial)
        if rank == slowed_rank:
            steps = itertools.count()
            model.register_forward_pre_hook(
                lambda *_: _spin(seconds) if next(steps) % every == every - 1 else None
            )

    training.join_peers, training.checkpoint_activations = joined, checkpointed


def _spin(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


if __name__ == "__main__":
    slow_down(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")
