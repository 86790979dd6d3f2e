"""Ranks of the all-reduce benchmarks: the same message over each process group in turn.

All groups live in the same processes. Each round times one call of each group after a tight
barrier, and the time of the slower rank counts. Payloads are verified.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Mapping

WARM_UP = 3  # the first calls set up connections and fault in pages


@dataclass(slots=True)
class Timed:
    """One value for each round."""

    seconds: list[float] = field(default_factory=list)  # on the slower rank
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads of rank 0's process


def measure(
    groups: Mapping[str, dist.ProcessGroup], size_bytes: int, rounds: int
) -> dict[str, Timed]:
    """Collective over the world."""
    tensor = torch.empty(size_bytes // 4)
    timed = {name: Timed() for name in groups}
    for number in range(rounds + WARM_UP):
        for name, group in groups.items():
            seconds, cpu_seconds = _call(group, tensor)
            if number >= WARM_UP:
                timed[name].seconds.append(seconds)
                timed[name].cpu_seconds.append(cpu_seconds)
    return timed


def _call(group: dist.ProcessGroup, tensor: torch.Tensor) -> tuple[float, float]:
    tensor.fill_(1.0)
    MPI.COMM_WORLD.Barrier()  # spins, so that all begin within microseconds
    cpu_before, started = _cpu_seconds(), time.perf_counter()
    dist.all_reduce(tensor, group=group)
    elapsed, cpu = time.perf_counter() - started, _cpu_seconds() - cpu_before
    if not bool((tensor == dist.get_world_size(group)).all()):
        raise RuntimeError("all-reduce gave a wrong sum")
    return MPI.COMM_WORLD.allreduce(elapsed, MPI.MAX), cpu


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
