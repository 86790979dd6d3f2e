"""One rank that torchrun starts; the last one is killed in its first life.

usage: restarts.py BACKEND FOLDER

In its second life each rank writes FOLDER/restarted.RANK: the sum over all ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.distributed  # noqa: F401  (back end "paceline")


def main() -> None:
    backend, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=20))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(5):
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor)
        if is_first_life and rank == ranks - 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, f"restarted.{rank}").write_text(str(float(tensor.sum())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
