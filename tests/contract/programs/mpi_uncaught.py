"""Run by mpirun with two ranks: rank 1 leaves with an error that it does not catch.

usage: mpi_uncaught.py TRANSPORT FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.mpi  # noqa: F401  (the backend)

dist.init_process_group("mpi4py")
if dist.get_rank() == 1:
    raise RuntimeError("rank 1 has had enough")
dist.all_reduce(torch.ones(1))
(Path(sys.argv[2]) / "went_on").touch()
