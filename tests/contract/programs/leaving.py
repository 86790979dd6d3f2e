"""Run by mpirun with two ranks: rank 1 freezes; rank 0 catches the error, and comes to its end.

usage: leaving.py mpi FOLDER LIMIT_S
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.mpi  # noqa: F401  (the backend, and where the ranks meet)
from paceline.base.errors import TimedOut
from paceline.collectives.mpi import point_to_point

point_to_point._PYTHON_ENDS_S = 4.0  # no machine is so busy that this program ends in 20 s only


def main() -> None:
    folder, limit_s = Path(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("mpi4py", timeout=timedelta(seconds=limit_s))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(1))
    except TimedOut as error:
        (folder / "caught").write_text(str(error))
    dist.destroy_process_group()


main()
