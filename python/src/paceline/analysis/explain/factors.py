"""Split a difference in the time on cores into CPU time and cores at work.

The ranks spend w = C / q seconds of a step on their cores (computation, optimiser, other): C is the
CPU time of the run per step, and q the cores that were at work meanwhile. q is the allocated cores
k times the share u of them that was at work. The logarithmic mean L(a, b) = (b - a) / ln(b / a)
divides the difference exactly (logarithmic mean Divisia index: B. W. Ang, Energy Policy 32(9),
2004):

    w_b - w_a = L(w_a, w_b) * (ln(C_b / C_a) - ln(k_b / k_a) - ln(u_b / u_a))

More CPU time for the same arithmetic means slower cores (memory bandwidth, caches, frequency, a
shared physical core) or more work (other threads of the same processes). A smaller share u means
waiting for cores (quota, steal, competition) or for locks. Threads that work while the ranks wait
for data or for other ranks count, too, so the share can exceed 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CPU_TIME, ALLOCATED, AT_WORK = "cpu_time", "allocated_cores", "cores_at_work"
FACTOR_LABELS = {
    CPU_TIME: "CPU time per step",
    ALLOCATED: "allocated cores",
    AT_WORK: "share of the allocated cores at work",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of the time on cores in both configurations, and its part of the difference."""

    factor: str
    label: str
    unit: str
    faster: float
    slower: float
    difference_s: float  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOnCores:
    """Time on cores of one configuration, and the CPU time and cores that it follows from."""

    wall_s: float  # on cores in a step
    cpu_s: float  # CPU time of the run in a step
    cores: int  # allocated


def split_time_on_cores(faster: TimeOnCores, slower: TimeOnCores) -> tuple[Factor, ...]:
    """Return the three factors; their differences add up to that of the time on cores."""
    mean = _log_mean(faster.wall_s, slower.wall_s)
    factors = (
        (CPU_TIME, "s", faster.cpu_s, slower.cpu_s, 1.0),
        (ALLOCATED, "", float(faster.cores), float(slower.cores), -1.0),
        (AT_WORK, "", _at_work(faster), _at_work(slower), -1.0),
    )
    return tuple(
        Factor(
            factor=name,
            label=FACTOR_LABELS[name],
            unit=unit,
            faster=a,
            slower=b,
            difference_s=sign * mean * math.log(b / a),
        )
        for name, unit, a, b, sign in factors
    )


def _at_work(side: TimeOnCores) -> float:
    return side.cpu_s / side.wall_s / side.cores


def _log_mean(a: float, b: float) -> float:
    return a if math.isclose(a, b, rel_tol=1e-12) else (b - a) / math.log(b / a)
