"""Two configurations side by side: what the rules for causes look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.analysis.explain.evidence import FIGURES_BY_NAME, amount

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.explain.difference import Difference
    from paceline.analysis.explain.factors import Factor
    from paceline.plan.trial import Trial


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
