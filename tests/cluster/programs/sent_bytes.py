"""Run by mpirun with a rank on each host: sends by every algorithm, and counts the bytes.

usage: sent_bytes.py FOLDER

FOLDER/RANK.json: for each operation the bytes and messages that its schedule counted (None where
the library does not count), and the bytes that the host's interface has sent and received.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from sent_bytes_case import ALL_GATHER, ELEMENTS, SAMPLES, make_model
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.mpi
from paceline.collectives.message_schedules import ALGORITHMS
from paceline.collectives.mpi.message_collectives import MessageCollectives, Traffic
from paceline.collectives.mpi.world import RankNames
from paceline.runner.lab import INTERFACE
from paceline.train.transports.bucket_settings import FactorSetting

LIMIT_S = 30.0


def interface_bytes() -> tuple[int, int]:
    """Return the bytes that the interface has received and sent."""
    for line in Path("/proc/self/net/dev").read_text("ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            values = counters.split()
            return int(values[0]), int(values[8])
    raise LookupError(f"no interface {INTERFACE}")


class Counter:
    """Runs operations and keeps what they sent."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def count(self, name: str, run: Callable[[], Traffic | None]) -> None:
        run()  # opens connections
        MPI.COMM_WORLD.Barrier()
        before = interface_bytes()
        traffic = run()
        MPI.COMM_WORLD.Barrier()
        received, sent = (a - b for a, b in zip(interface_bytes(), before, strict=True))
        counted = None if traffic is None else [traffic.bytes, traffic.messages]
        self.found[name] = {"counted": counted, "sent": sent, "received": received}


def main() -> None:
    torch.set_num_threads(1)
    counter = Counter()
    count_algorithms(counter)
    for backend, options in (("gloo", None), ("mpi4py", paceline.mpi.Options(algorithm="ring"))):
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group(backend, timeout=limit, pg_options=options)
        count_collectives(counter, backend)
        dist.destroy_process_group()
    Path(sys.argv[1], f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(counter.found))


def count_algorithms(counter: Counter) -> None:
    names = RankNames.gather(MPI.COMM_WORLD, LIMIT_S)
    messages = MessageCollectives(MPI.COMM_WORLD.Dup(), names, LIMIT_S)
    buffer = np.ones(ELEMENTS, np.float32)
    for algorithm in ALGORITHMS:
        counter.count(algorithm, partial(messages.allreduce, buffer, np.add, algorithm))
    ring = MessageCollectives(MPI.COMM_WORLD.Dup(), names, LIMIT_S)
    own = (np.arange(ELEMENTS, dtype=np.float32) + MPI.COMM_WORLD.rank).view(np.uint8)
    everyone = np.zeros(MPI.COMM_WORLD.size * len(own), np.uint8)
    counter.count(ALL_GATHER, partial(ring.all_gather, everyone, own))
    check_gathered(ALL_GATHER, torch.from_numpy(everyone.view(np.float32)))


def count_collectives(counter: Counter, backend: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, everyone = torch.arange(ELEMENTS) + float(rank), torch.empty(ranks * ELEMENTS)
    zeros = torch.zeros(ELEMENTS)

    def reduce() -> None:
        dist.all_reduce(zeros)

    def gather() -> None:
        dist.all_gather_single(everyone, own)

    counter.count(f"{backend} all-reduce", reduce)
    counter.count(f"{backend} all-gather", gather)
    check_gathered(backend, everyone)
    for setting in ("never", "always"):
        counter.count(f"{backend} step, factors {setting}", step_of(setting))


def check_gathered(what: str, everyone: torch.Tensor) -> None:
    ranks = MPI.COMM_WORLD.size
    expected = torch.arange(ELEMENTS) + torch.arange(float(ranks))[:, None]
    if not torch.equal(everyone.view(ranks, -1), expected):
        raise ValueError(f"{what}: the all-gather returned wrong values")


def step_of(setting: FactorSetting) -> Callable[[], None]:
    """Return one step of training."""
    example = torch.zeros(1, 3, 8, 8)
    model = paceline.with_factors(
        DistributedDataParallel(make_model()),
        example, samples=SAMPLES, setting=setting, limit_s=LIMIT_S,
    )  # fmt: skip

    def step() -> None:
        inputs = torch.ones(SAMPLES, 3, 8, 8)
        cross_entropy(model(inputs), torch.zeros(SAMPLES, dtype=torch.long)).backward()

    return step


if __name__ == "__main__":
    main()
