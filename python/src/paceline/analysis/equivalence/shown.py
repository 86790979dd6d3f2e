"""Say what is shown of a layout: by its ranks against each other, and by one process.

The comparison with one process counts where the samples are equal; a layout whose samples, start or
random numbers differ from those of one process may be right, and only its ranks judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.equivalence.observed import LayoutFinding
from paceline.analysis.equivalence.own_checks import (
    Level,
    RankFinding,
)
from paceline.analysis.equivalence.ranks import RanksFinding, Statement
from paceline.measure.records.own_steps import COMPRESSED, UNEVEN

# Differences that are faults although ranks agree with each other.
_FAULTS = {"gradient", "update", "replicas"}
# Kinds of training that are meant to differ from one process.
_BY_DESIGN = {"averaged", "rounded", COMPRESSED, UNEVEN}
# What gradients that are equal to those of one process do not excuse.
_ALWAYS = {"exchange"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The highest statement that is true of a layout, and all findings, the cause first."""

    statement: Statement
    findings: tuple[RankFinding, ...]
    steps: int
    rows: tuple[int, ...]  # of each rank in the first step

    @property
    def is_suspicious(self) -> bool:
        return any(each.level == Level.SUSPICION for each in self.findings)

    @property
    def step(self) -> int | None:
        """Return the step of the first fault."""
        return next((each.step for each in self.findings if each.level == Level.FAULT), None)


def shown(one_process: LayoutFinding, ranks: RanksFinding) -> Shown:
    """Return what both comparisons show together."""
    found = list(ranks.findings)
    statement = ranks.statement
    is_zero = any(each.level == Level.NOT_SHOWN and each.kind in _ALWAYS for each in found)
    by_design = any(each.kind in _BY_DESIGN for each in found)
    if one_process.passed is False and one_process.kind in _FAULTS and not by_design:
        if not _is_known(one_process, found):
            found.insert(0, _as_finding(one_process, Level.FAULT))
        statement = Statement.WRONG
    elif any(e.kind == "no-optimiser" and e.tensor == one_process.tensor for e in found):
        found.insert(0, _as_finding(one_process, Level.FAULT))  # one process steps it
        statement = Statement.WRONG
    elif one_process.passed and statement != Statement.WRONG and not is_zero:
        found = [each for each in found if each.level == Level.REMARK]
        statement = Statement.EQUAL
    elif not one_process.passed:
        level = Level.WEAKER if one_process.kind == "module" else Level.REMARK
        found.append(_as_finding(one_process, level))
        if level == Level.WEAKER and statement == Statement.DATA_PARALLEL:
            statement = Statement.MEAN
    return Shown(
        statement=statement,
        findings=tuple(found),
        steps=max(one_process.steps if one_process.passed else 0, ranks.steps),
        rows=ranks.rows,
    )


def _is_known(finding: LayoutFinding, found: Sequence[RankFinding]) -> bool:
    """Return whether the ranks show a fault from which the difference follows."""
    return any(
        each.level == Level.FAULT and (each.step or 0) <= (finding.step or 0) for each in found
    )


def _as_finding(finding: LayoutFinding, level: Level) -> RankFinding:
    beside = "" if level == Level.FAULT else "not compared with one process: "
    return RankFinding(
        level=level,
        kind=f"one-process {finding.kind}",
        reason=beside + finding.reason,
        step=finding.step,
        tensor=finding.tensor,
        factor=finding.factor,
    )
