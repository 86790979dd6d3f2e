"""Ranks of the benchmarks of collective operations: the same message over each group in turn.

All groups live in the same processes. Each round times one call of each operation after a tight
barrier, and the time of the slowest rank counts. Results are verified.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

WARM_UP = 3  # the first calls set up connections and fault in pages


@dataclass(slots=True)
class Timed:
    """One value for each round."""

    seconds: list[float] = field(default_factory=list)  # on the slowest rank
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads of rank 0's process


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective operation. Inputs are filled with 1 before each call."""

    run: Callable[[], object]
    inputs: torch.Tensor
    outputs: torch.Tensor
    expected: float | None  # each element of the outputs; None on a rank that gets no result

    def prepare(self) -> None:
        self.outputs.zero_()
        self.inputs.fill_(1.0)

    def check(self, name: str) -> None:
        """Raise RuntimeError if the result is wrong."""
        if self.expected is not None and not bool((self.outputs == self.expected).all()):
            raise RuntimeError(f"{name} gave a wrong result")


def all_reduce(group: Any, size_bytes: int, *, in_place: bool = False) -> Operation:
    """in_place: the ranks of a host share the tensor; collective."""
    tensor, ranks = torch.empty(size_bytes // 4), dist.get_world_size(group)
    if in_place:
        group.share_tensor(tensor)
    return Operation(partial(dist.all_reduce, tensor, group=group), tensor, tensor, ranks)


def measure(operations: Mapping[str, Operation], rounds: int) -> dict[str, Timed]:
    """Call all operations in turn, in each round; collective over the world."""
    timed = {name: Timed() for name in operations}
    for number in range(rounds + WARM_UP):
        for name, operation in operations.items():
            seconds, cpu_seconds = _call(name, operation)
            if number >= WARM_UP:
                timed[name].seconds.append(seconds)
                timed[name].cpu_seconds.append(cpu_seconds)
    return timed


def _call(name: str, operation: Operation) -> tuple[float, float]:
    operation.prepare()
    MPI.COMM_WORLD.Barrier()  # spins, so that all begin within microseconds
    cpu_before, started = _cpu_seconds(), time.perf_counter()
    operation.run()
    elapsed, cpu = time.perf_counter() - started, _cpu_seconds() - cpu_before
    operation.check(name)
    return MPI.COMM_WORLD.allreduce(elapsed, MPI.MAX), cpu


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
