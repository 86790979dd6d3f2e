"""Run by mpirun with two ranks: rank 1 ends with an error that it does not catch.

usage: mpi_uncaught.py TRANSPORT FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.mpi  # noqa: F401  (the backend)

folder = Path(sys.argv[2])
dist.init_process_group("mpi4py")
dist.all_reduce(torch.ones(1))
(folder / f"began.{dist.get_rank()}").touch()
dist.barrier()
if dist.get_rank() == 1:
    raise RuntimeError("a fault of rank 1")
dist.all_reduce(torch.ones(1))
(folder / f"continued.{dist.get_rank()}").touch()
