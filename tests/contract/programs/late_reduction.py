"""Run by mpirun: rank 1 does not come to an all-reduce; the others say for whom they wait.

The group counts its ranks otherwise than the world: the last comes first.

usage: late_reduction.py mpi FOLDER LIMIT_S ALGORITHM…
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from paceline.collectives.torch_internals import PrefixStore

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context

from paceline.base.errors import TimedOut
from paceline.collectives.mpi.all_reduce import AllReduce
from paceline.collectives.mpi.world import RankNames
from paceline.train.rank.peers import open_store

folder, limit_s = Path(sys.argv[2]), float(sys.argv[3])
store = open_store(make_context(folder), 30.0)
world = MPI.COMM_WORLD
comm = world.Split(0, (world.rank + 1) % world.size)
names = RankNames.gather(comm, limit_s)
for algorithm in sys.argv[4:]:
    group = AllReduce(
        comm,
        names=names,
        store=PrefixStore(algorithm, store),
        limit_s=limit_s,
        algorithm=algorithm,
    )
    group.allreduce(np.ones(10_000, np.float32), np.add)
    if world.rank == 1:
        while len(list(folder.glob(f"{algorithm}.*"))) < world.size - 1:
            time.sleep(0.02)
        continue
    try:
        group.allreduce(np.ones(10_000, np.float32), np.add)
        said = "nothing"
    except TimedOut as error:
        said = str(error)
    (folder / f"{algorithm}.{world.rank}").write_text(said)
os._exit(0)  # MPI cannot be ended in order any more
