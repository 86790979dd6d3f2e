"""Two configurations side by side: what the rules for causes look at.

Split a difference in the time on cores into CPU time and cores at work.

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
from typing import TYPE_CHECKING

from paceline.analysis.explain.evidence import FIGURES_BY_NAME, amount

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.explain.difference import Difference
    from paceline.plan.trial import Trial

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerEvidence:
    """The rank that makes the others wait."""

    rank: int
    host: str | None
    delay_s: float  # a step
    phase: str | None  # in which it spends more time than the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two configurations; medians over its repeats."""

    name: str
    trial: Trial
    step_s: float
    cores: int  # that its ranks may use, on all hosts
    evidence: Mapping[str, float | None]  # by the names of `evidence.ALL_FIGURES`
    straggler: StragglerEvidence | None  # in most of its repeats
    pass_comm_s: float = 0.0  # communication of layers within the passes, per step

    def per_step(self, figure: str) -> float | None:
        """Return what a rate per second makes in a step."""
        value = self.evidence.get(figure)
        return None if value is None else value * self.step_s

    @property
    def threads(self) -> int:
        """Threads that compute, as planned."""
        place = self.trial.placement
        return place.ranks * place.threads_per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both sides, with the difference of their steps."""

    faster: Side
    slower: Side
    difference: Difference
    factors: Sequence[Factor]  # of the time on cores; empty without CPU times

    def rise(self, figure: str) -> float:
        """Return by how much more of a figure the slower one has; 0 if it is unknown."""
        ours, theirs = self.faster.evidence.get(figure), self.slower.evidence.get(figure)
        return 0.0 if ours is None or theirs is None else theirs - ours

    def words(self, *figures: str) -> list[str]:
        """Return for each known figure for example `IOWait: 12 % instead of 1 %`."""
        found = []
        for name in figures:
            figure = FIGURES_BY_NAME[name]
            ours, theirs = self.faster.evidence.get(name), self.slower.evidence.get(name)
            if ours is not None and theirs is not None:
                values = f"{amount(theirs, figure.unit)} instead of {amount(ours, figure.unit)}"
                found.append(f"{figure.label}: {values}")
        return found

    def factor_s(self, name: str) -> float:
        """Return the difference that a factor of the time on cores makes; 0 if it is unknown."""
        return next((f.difference_s for f in self.factors if f.factor == name), 0.0)

    def factor_words(self, name: str) -> list[str]:
        return [
            f"{f.label}: {amount(f.slower, f.unit)} instead of {amount(f.faster, f.unit)}"
            for f in self.factors
            if f.factor == name
        ]

    @property
    def same_layout(self) -> bool:
        """Tell whether both have the same strategy, ranks and threads."""
        ours, theirs = self.faster.trial, self.slower.trial
        return (ours.local_strategy, ours.placement) == (theirs.local_strategy, theirs.placement)
