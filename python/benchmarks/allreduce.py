"""Allreduce between two ranks on one host: the mpi transport against Gloo, interleaved.

    mpirun -n 2 --bind-to none python allreduce.py --out results/allreduce.json

Both process groups live in the same two processes; each repeat times one call of each in turn,
after one and the same tight barrier, and the slower rank's time counts. Payloads are verified.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

from common import median_interval, paired_ratio, shown, write_results
from paceline.train.collectives.mpi import transport as mpi

LIMIT = timedelta(seconds=60)
SIZES_BYTES = (25_000_000, 100_000_000)


def timed_s(group: dist.ProcessGroup, tensor: torch.Tensor) -> float:
    """Seconds of one allreduce on the slower rank."""
    tensor.fill_(1.0)
    MPI.COMM_WORLD.Barrier()  # spins, so that both begin within microseconds
    started = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    elapsed = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    if not bool((tensor == dist.get_world_size(group)).all()):
        raise RuntimeError("allreduce gave a wrong sum")
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
    return float(elapsed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    mpi.init_process_group(timeout=LIMIT)
    over_mpi = dist.group.WORLD
    over_gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    groups = {"mpi": over_mpi, "gloo": over_gloo}

    results = {}
    for size in SIZES_BYTES:
        tensor = torch.empty(size // 4)
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        for repeat in range(arguments.repeats + 3):
            for name, group in groups.items():
                taken = timed_s(group, tensor)
                if repeat >= 3:  # the first calls set up connections and fault in pages
                    seconds[name].append(taken)
        ratio = paired_ratio(seconds["gloo"], seconds["mpi"])
        results[str(size)] = {"seconds": seconds, "gloo_over_mpi": ratio}
        if dist.get_rank() == 0:
            for name, values in seconds.items():
                shown(f"{size / 1e6:.0f} MB {name}", median_interval(values), "s")
            shown(f"{size / 1e6:.0f} MB Gloo / mpi (asked at 25 MB: 4)", ratio, "x")
    if dist.get_rank() == 0:
        write_results(arguments.out, "allreduce", {"bytes": results})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
