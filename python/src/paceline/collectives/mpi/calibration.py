"""Choose an all-reduce algorithm for each message size from about one second of measurements.

All ranks follow the decisions of rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from mpi4py import MPI

from paceline.collectives.mpi.polling import complete

BUDGET_S = 1.0
_SIZES_BYTES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20, 16 * 2**20)
_REPEATS = 2
_DECIDED_BYTES = tuple(2**power for power in range(10, 29))  # 1 KiB to 256 MiB
_WORTHWHILE = 0.97  # a change of algorithm must gain more than noise


@dataclass(slots=True)
class Curve:
    """Measured seconds by message size, in ascending order of the sizes."""

    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def at(self, size_bytes: int) -> float:
        """Interpolate linearly between sizes; constant below the smallest, proportional to the size
        beyond the largest.

        The budget ends a calibration early only where messages are so slow that the largest
        measured one already shows the time per byte.
        """
        if size_bytes > self.bytes[-1]:
            return self.seconds[-1] * size_bytes / self.bytes[-1]
        return float(np.interp(size_bytes, self.bytes, self.seconds))


@dataclass(frozen=True, slots=True)
class Bin:
    """The algorithm of messages of up to this many bytes; None means any size."""

    up_to_bytes: int | None
    algorithm: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Measurements of rank 0, and the decision that all ranks follow."""

    bins: tuple[Bin, ...]
    curves: dict[str, Curve]
    took_s: float

    def algorithm_for(self, size_bytes: int) -> str:
        return next(
            choice.algorithm
            for choice in self.bins
            if choice.up_to_bytes is None or size_bytes <= choice.up_to_bytes
        )


def decide(curves: dict[str, Curve]) -> tuple[Bin, ...]:
    """Return the fastest algorithm by message size, changed only where the gain exceeds noise."""
    winners: list[str] = []
    for size in _DECIDED_BYTES:
        seconds = {name: curve.at(size) for name, curve in curves.items()}
        best = min(seconds, key=lambda name: seconds[name])
        if winners and seconds[best] > seconds[winners[-1]] * _WORTHWHILE:
            best = winners[-1]
        winners.append(best)
    bins = []
    for algorithm, run in groupby(zip(_DECIDED_BYTES, winners, strict=True), lambda pair: pair[1]):
        largest = [size for size, _ in run][-1]
        # the geometric mean of two powers of two
        bins.append(Bin(int(largest * math.sqrt(2)), algorithm))
    bins[-1] = Bin(None, bins[-1].algorithm)
    return tuple(bins)


def calibrate(
    algorithms: Sequence[str],
    run: Callable[[str, int], None],
    agree: Callable[[Any], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Measure the algorithms at increasing sizes within the time budget; collective.

    run: performs an all-reduce of the given bytes with the given algorithm. It cannot end on one
    rank before the last rank has started, so rank 0's time is representative. agree: returns rank
    0's value on all ranks. A single algorithm is not measured.
    """
    if len(algorithms) == 1:
        return Choice((Bin(None, algorithms[0]),), {}, 0.0)
    started = clock()
    curves = {name: Curve() for name in algorithms}
    for name in algorithms:
        run(name, _SIZES_BYTES[0])  # opens connections and fills caches
    for size in _SIZES_BYTES:
        measured: dict[str, float] = {}
        for name, curve in curves.items():
            expected = _REPEATS * curve.at(size) if curve.bytes else 0.0
            if curve.bytes and not agree(clock() - started + expected <= BUDGET_S):
                break
            measured[name] = min(_timed(name, size, run, clock) for _ in range(_REPEATS))
        if len(measured) < len(curves):
            break
        for name, seconds in measured.items():
            curves[name].bytes.append(size)
            curves[name].seconds.append(seconds)
    choice: Choice = agree(Choice(decide(curves), curves, clock() - started))
    return choice


def _timed(
    name: str, size: int, run: Callable[[str, int], None], clock: Callable[[], float]
) -> float:
    started = clock()
    run(name, size)
    return clock() - started


def of_rank_0(value: Any, comm: MPI.Intracomm, world_rank: int, limit_s: float) -> Any:
    """Return rank 0's value on all ranks; collective. Raises TimedOut.

    mpi4py's own bcast of an object spins, and cannot be given up.
    """
    text = MPI.pickle.dumps(value)
    length = np.array([len(text)], np.int64)
    complete(comm.Ibcast(length, 0), "calibration", world_rank, limit_s)
    content = np.zeros(int(length[0]), np.uint8)
    if comm.rank == 0:
        content[:] = np.frombuffer(text, np.uint8)
    complete(comm.Ibcast(content, 0), "calibration", world_rank, limit_s)
    return MPI.pickle.loads(content.tobytes())
