"""mpi-jobs/train.py with a seeded fault: gradients are averaged wrongly, by the number of ranks.

usage: mpirun … python broken_reducer.py SCRIPT ARGUMENTS…
"""

import runpy
import sys

import torch

from paceline.train.strategies.reduction.buckets import Buckets


def wrong(state, bucket) -> torch.futures.Future[torch.Tensor]:
    return right(state, bucket).then(lambda future: future.value() * 2)


if __name__ == "__main__":
    right = Buckets.sum
    # DDP looks at the hook's annotations
    wrong.__annotations__ = right.__annotations__
    Buckets.sum = wrong
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
