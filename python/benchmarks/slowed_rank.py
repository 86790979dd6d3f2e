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

from paceline.rank import train as worker


def slow_down(slowed_rank: int, seconds: float, every: int) -> None:
    """From now on, for the rank that this process joins as."""
    training: Any = worker
    join_peers, build_model = training.join_peers, training.build_model
    rank = None

    def joined(context: Any, trial: Any) -> Any:
        nonlocal rank
        rank = context.rank
        return join_peers(context, trial)

    def built(*arguments: Any, **options: Any) -> Any:
        model = build_model(*arguments, **options)
        if rank == slowed_rank:
            steps = itertools.count()
            model.register_forward_pre_hook(
                lambda *_: _spin(seconds) if next(steps) % every == every - 1 else None
            )
        return model

    training.join_peers, training.build_model = joined, built


def _spin(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


if __name__ == "__main__":
    slow_down(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")
