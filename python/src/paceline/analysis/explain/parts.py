"""Parts of a step, which add up to the step time in every step.

The phases of each rank add up to its step, so any average over ranks adds up, too. The remainder is
the time between the steps of a rank. Usually the average is over all ranks. Where one rank makes
the others wait, it is left out: then the others' waiting shows what the straggler costs, and their
computation is what a step would take without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.trial.operations import clock_errors
from paceline.analysis.trial.steps import global_steps, read_steps
from paceline.analysis.trial.stragglers import find_straggler
from paceline.records.phases import LABELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.analysis.trial.reading import TrialRecord
    from paceline.analysis.trial.steps import GlobalSteps, RankSteps
    from paceline.analysis.trial.stragglers import Lateness

COMPUTATION, REMAINDER = "computation", "remainder"
_CLOCK_S = 1e-5  # a smaller distance between two unix times is rounding


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step: the sum of some phases of the ranks."""

    name: str
    label: str
    phases: tuple[str, ...]  # of records.phases; empty for the remainder


def _phase(name: str) -> Part:
    return Part(name, LABELS[name], (name,))


PARTS = (
    Part(COMPUTATION, "computation", ("forward", "backward")),
    _phase("data_wait"),
    _phase("bubble"),
    _phase("comm_wait"),
    _phase("comm_transfer"),
    _phase("optimizer"),
    _phase("other"),
    Part(REMAINDER, "between steps", ()),
)
PART_NAMES = tuple(part.name for part in PARTS)
# parts in which the ranks use their cores; in the others they wait or transfer
ON_CORES = (COMPUTATION, "optimizer", "other", REMAINDER)
PART_LABELS = {part.name: part.label for part in PARTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialParts:
    """The steps of one trial after the warm-up, reduced to parts.

    means: seconds per step in the order of PARTS, shape (parts,); they add up to the mean step.
    """

    means: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSteps:
    """The steps of one trial, and the rank that makes the others wait."""

    record: TrialRecord
    steps: RankSteps
    common: GlobalSteps
    straggler: Lateness | None  # None in a pipeline, whose stages do different work
    straggler_phase: str | None  # in which it spends more time than the others
    latest: int | None  # rank with the largest mean delay; None for fewer than two ranks

    def parts(self, *, without_latest: bool) -> TrialParts:
        """Return the parts of a trial with at least one step after the warm-up.

        without_latest: average over all ranks but the one with the largest delay.
        """
        values = self._values(without_latest=without_latest)
        return TrialParts(means=values.mean(axis=1))

    def _values(self, *, without_latest: bool) -> NDArray[np.float64]:
        """Return seconds by part and step, shape (parts, steps)."""
        steady = self.common.steady
        chosen = np.searchsorted(self.steps.step, self.common.step[steady])
        kept = [
            number
            for number, rank in enumerate(self.steps.ranks)
            if not (without_latest and rank == self.latest)
        ]
        values = np.zeros((len(PARTS), len(chosen)))
        for row, part in enumerate(PARTS):
            for phase in part.phases:
                seconds = self.steps[f"{phase}_s"][kept][:, chosen]
                values[row] += np.nan_to_num(seconds).mean(axis=0)
        values[-1] = self._walls(kept)[steady] - values.sum(axis=0)
        return values

    def _walls(self, kept: list[int]) -> NDArray[np.float64]:
        """Return the time of each common step from end to end, mean over the ranks.

        The end of a step is that of each rank, not of the last one: ranks that end at different
        times would otherwise add to a few steps what is no part of them. A step that follows an
        evaluation begins with its own start.
        """
        places = np.searchsorted(self.steps.step, self.common.step)
        ended = self.steps["ended_s"][kept][:, places]
        began = self.steps["started_s"][kept][:, places]
        last_ended = self.common.ended_unix_s
        follows = last_ended[1:] - self.common.time_s[1:] - last_ended[:-1] < _CLOCK_S
        began[:, 1:] = np.where(follows, ended[:, :-1], began[:, 1:])
        walls: NDArray[np.float64] = (ended - began).mean(axis=0)
        return walls


def trial_steps(record: TrialRecord) -> TrialSteps:
    """Read the steps of a trial, and find its straggler. Raises DataError for a damaged file."""
    steps = read_steps(record)
    straggler, phase, latest = None, None, None
    if record.trial.placement.stages == 1:
        for found in find_straggler(record, steps, clock_errors(record)):
            if found.ranks:
                latest = found.ranks[0].rank
            if found.straggler is not None:
                straggler, phase = found.ranks[0], found.phase
    return TrialSteps(
        record=record,
        steps=steps,
        common=global_steps(record, steps),
        straggler=straggler,
        straggler_phase=phase,
        latest=latest,
    )


def parts_of_phases(phases: Mapping[str, float | None]) -> dict[str, float]:
    """Add up mean phases to the parts, without the remainder; 0 where nothing was measured."""
    return {part.name: sum(phases.get(p) or 0.0 for p in part.phases) for part in PARTS[:-1]}
