"""At which rate of failures one configuration overtakes another.

The expected time of a training is that of J. T. Daly (see `costs.checkpoint_interval`), with the
measured step time, cost of a checkpoint and cost of a restart, and the best interval for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from paceline.costs.checkpoint_interval import daly_interval_s, expected_time_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.recovery import Recovery

# Mean times between failures that are compared: from a minute to a year.
_MTBF_S = np.geomspace(60.0, 365 * 86400.0, 2000)
_SMALLEST_COST_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """Cost of a failure of a kind under a configuration: medians over them, in seconds."""

    configuration: str
    kind: str | None  # None: the run did not cause them
    step_s: float
    failures: int
    lost_steps: float
    lost_work_s: float | None
    detect_s: float | None
    restart_s: float | None
    restore_s: float
    next_step_s: float | None
    checkpoint_s: float  # by which a checkpoint delays the training

    @property
    def downtime_s(self) -> float:
        """From a failure to the first new step, without the repeated work."""
        parts = (self.detect_s, self.restart_s, self.next_step_s)
        return self.restore_s + sum(part for part in parts if part is not None)

    def relative_time(self, mtbf_s: float) -> float:
        """Return the expected time of a step with failures, in seconds."""
        cost_s = max(_SMALLEST_COST_S, self.checkpoint_s)
        return self.step_s * expected_time_s(
            1.0,
            daly_interval_s(cost_s, mtbf_s),
            cost_s=cost_s,
            restart_s=self.downtime_s,
            mtbf_s=mtbf_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overtaking:
    """Two configurations of which each is faster at some rate of failures of a kind."""

    kind: str | None
    rare: str  # faster where failures are rarer than one in `mtbf_s`
    frequent: str  # faster where they are more frequent
    mtbf_s: float


def failure_costs(comparison: Comparison) -> list[FailureCost]:
    """Return the cost of a failure of each kind under each configuration that survived one."""
    found = []
    for row in comparison.rows:
        trials = comparison.trials.get(row.configuration, ())
        survived = [each for trial in trials for each in trial.recoveries]
        blocked = [t.checkpoints.blocked_s for t in trials if t.checkpoints is not None]
        if row.step_s is None:
            continue
        for kind in dict.fromkeys(each.kind for each in survived):
            cost = _cost(
                [each for each in survived if each.kind == kind],
                configuration=row.configuration,
                step_s=row.step_s.median,
                checkpoint_s=median(blocked) if blocked else 0.0,
            )
            found.append(cost)
    return found


def _cost(
    failures: Sequence[Recovery], *, configuration: str, step_s: float, checkpoint_s: float
) -> FailureCost:
    """Return the cost of failures of one kind. failures: at least one."""
    return FailureCost(
        configuration=configuration,
        kind=failures[0].kind,
        step_s=step_s,
        failures=len(failures),
        lost_steps=median(each.lost_steps for each in failures),
        lost_work_s=_median(each.lost_work_s for each in failures),
        detect_s=_median(each.detect_s for each in failures),
        restart_s=_median(each.restart_s for each in failures),
        restore_s=median(each.restore_s for each in failures),
        next_step_s=_median(each.next_step_s for each in failures),
        checkpoint_s=checkpoint_s,
    )


def overtakings(costs: Sequence[FailureCost]) -> list[Overtaking]:
    """Return the pairs whose order depends on the rate of failures, for each kind of failures."""
    found = []
    for number, first in enumerate(costs):
        for second in costs[number + 1 :]:
            if first.kind != second.kind:
                continue
            differences = np.array(
                [first.relative_time(m) - second.relative_time(m) for m in _MTBF_S]
            )
            changes = np.flatnonzero(np.diff(np.sign(differences)))
            if not len(changes):
                continue
            place = int(changes[-1])
            is_first_faster = bool(differences[-1] < 0)
            rare, frequent = (first, second) if is_first_faster else (second, first)
            found.append(
                Overtaking(
                    kind=first.kind,
                    rare=rare.configuration,
                    frequent=frequent.configuration,
                    mtbf_s=float(_MTBF_S[place]),
                )
            )
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
