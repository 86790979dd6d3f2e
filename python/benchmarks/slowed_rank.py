"""A job script with one rank slowed on purpose: a busy loop at the start of every forward pass.

usage: … python slowed_rank.py RANK SECONDS SCRIPT ARGUMENTS…

What a profile of such a run must say is known beforehand; see straggler.py and
tests/functional/test_profile.py.
"""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

from paceline.train import worker


def slow_down(slowed_rank: int, seconds: float) -> None:
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
            model.register_forward_pre_hook(lambda *_: _spin(seconds))
        return model

    training.join_peers, training.build_model = joined, built


def _spin(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


if __name__ == "__main__":
    slow_down(int(sys.argv[1]), float(sys.argv[2]))
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
