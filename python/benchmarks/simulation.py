"""Run simulations, each in a process of its own."""

from __future__ import annotations

import importlib.machinery
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING

import simulation_program as program
from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from simulation_job import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation_job import Topology

LIMIT_S = 300  # of one simulation
# Simulated in about a minute: a ring of a thousand hosts has 50,000.
_MOST_MESSAGES = 100_000
_UNIT_BYTES, _UNIT_S = 10**9, 1e-3


@cache
def why_not() -> str | None:
    """Return the reason why nothing can be simulated here; None if SimGrid can be imported."""
    places = [*sys.path, program.DEBIAN_PACKAGES]
    found = importlib.machinery.PathFinder.find_spec("simgrid", places)
    if found is not None:
        return None
    return (
        "SimGrid is not installed for this Python; install Debian's python3-simgrid "
        "(apt install python3-simgrid)"
    )


def simulate(jobs: Sequence[Simulation]) -> list[float]:
    """Return the simulated seconds of each operation.

    Raises EnvironmentLacks without SimGrid, UsageError for an operation with too many messages, and
    TimedOut.
    """
    reason = why_not()
    if reason is not None:
        raise EnvironmentLacks(reason)
    for job in jobs:
        if job.simulated_messages > _MOST_MESSAGES:
            raise UsageError(
                f"simulation of {job.algorithm} on {job.ranks} hosts: expected at most "
                f"{_MOST_MESSAGES:,} messages, got {job.simulated_messages:,}; simulate fewer hosts"
            )
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(_simulate, jobs))


@cache
def contended_cost(algorithm: str, ranks: int, topology: Topology) -> tuple[float, float]:
    """Return rounds and path of an operation with contention, as `link_cost.CollectiveCost` has
    them without.

    rounds: seconds of empty messages over the latency of the link. path: seconds of long messages
    on links without latency, times bandwidth, over the payload.
    """
    if ranks == 1:
        return 0.0, 0.0

    def job(payload_bytes: int, latency_s: float) -> Simulation:
        return Simulation(
            algorithm=algorithm,
            ranks=ranks,
            payload_bytes=payload_bytes,
            latency_s=latency_s,
            bytes_per_s=_UNIT_BYTES,
            topology=topology,
        )

    empty_s, long_s = simulate([job(0, _UNIT_S), job(_UNIT_BYTES, 0.0)])
    return empty_s / _UNIT_S, long_s


def _simulate(job: Simulation) -> float:
    content = json.dumps({**asdict(job), "limit_s": LIMIT_S})
    try:
        ended = subprocess.run(
            [sys.executable, program.__file__],
            input=content,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _late(job) from error
    if ended.returncode == -signal.SIGALRM:
        raise _late(job)
    if ended.returncode != 0:
        raise EnvironmentLacks(f"SimGrid failed: {ended.stderr.strip()[-2000:]}")
    return float(ended.stdout.splitlines()[-1])


def _late(job: Simulation) -> TimedOut:
    what = f"simulation of {job.algorithm} on {job.ranks} hosts"
    return TimedOut(f"{what} did not end within {LIMIT_S} s; simulate fewer hosts")
