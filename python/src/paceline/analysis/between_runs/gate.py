"""Judge a later run against an earlier one: is it slower than allowed, or another training?

A configuration is too slow if its speed is below the limit with significance: the hypothesis that
the later run is exactly as slow as allowed is rejected. All configurations of a workload are tested
together. A configuration that cannot be judged never passes. One is undecided if it is not shown to
be faster than that, and if so large a slowdown could not have been seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import computed_field
from pydantic.dataclasses import dataclass as json_dataclass

from paceline.analysis.between_runs.speeds import RunSpeeds, why_other_training
from paceline.analysis.between_runs.two_runs import paired_differences
from paceline.analysis.statistics.fastest import RISK_SHARE, differing
from paceline.analysis.statistics.intervals import CONFIDENCE, Interval
from paceline.analysis.statistics.model import Belief
from paceline.base.errors import ExitCode

Judgement = Literal["passed", "not equivalent", "slower", "no result", "undecided"]
# The first one that applies to any configuration decides: the speed of another training is not
# comparable, and a result is worth more than none.
_EXIT_CODES: dict[Judgement, ExitCode] = {
    "not equivalent": ExitCode.NOT_EQUIVALENT,
    "slower": ExitCode.SLOWER,
    "no result": ExitCode.NOT_COMPARABLE,
    "undecided": ExitCode.NOT_COMPARABLE,
    "passed": ExitCode.OK,
}


# Only a later run that is slower fails, so the two-sided level is twice the 5 % for the family.
_LEVEL = 2 * (1 - CONFIDENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One configuration of the earlier run."""

    workload: str
    configuration: str
    judgement: Judgement
    reason: str | None = None  # why it is not equivalent, or why there is no result
    ratio: Interval | None = None  # speed in the later run / in the earlier one
    # 1 - ratio that this test finds with a probability of 80 %
    detectable: float | None = None
    # of each run, to see the slowdown that is allowed; None: enough, or unknown
    needed_repeats: int | None = None


@json_dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """All configurations of the earlier run. limit: 1 - the smallest allowed ratio."""

    limit: float
    judged: tuple[Judged, ...]
    allows_undecided: bool = False  # they pass

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        found = {each.judgement for each in self.judged if not self.passes(each)}
        return next(code for name, code in _EXIT_CODES.items() if name in found or not code)

    def passes(self, judged: Judged) -> bool:
        is_allowed = judged.judgement == "undecided" and self.allows_undecided
        return judged.judgement == "passed" or is_allowed

    @property
    def detectable(self) -> float | None:
        """The largest of the differences that the tests find; None without a test."""
        found = [each.detectable for each in self.judged if each.detectable is not None]
        return max(found, default=None)


def judge(
    before: RunSpeeds, after: RunSpeeds, limit: float, *, allows_undecided: bool = False
) -> Gate:
    """Judge every configuration that finished in the earlier run and is a part of the later one."""
    judged: list[Judged] = []
    for workload in before.workloads:
        judged += _of_workload(workload, before, after, limit)
    return Gate(limit=limit, judged=tuple(judged), allows_undecided=allows_undecided)


def _of_workload(
    workload: str, before: RunSpeeds, after: RunSpeeds, limit: float
) -> Iterator[Judged]:
    runs = before.of_workload(workload), after.of_workload(workload)
    pairs = paired_differences(*runs)
    slowest = math.log1p(-limit)
    found = differing(pairs, slowest, level=_LEVEL)
    too_slow = {name for name in found if pairs[name].value < slowest}
    other = _other_training(workload, before, after)
    for name in runs[0].repeats:
        pair = pairs.get(name)
        if pair is None and name not in after.unfinished:
            continue  # it is no part of the later run
        judgement, reason = _judgement(pair, after.differences.get(name, other))
        if judgement == "passed" and name in too_slow:
            judgement = "slower"
        loss = None if pair is None or not pair.has_noise else _detectable_loss(pair, len(pairs))
        needed = None
        could_miss = loss is not None and loss > -slowest and name not in found
        if judgement == "passed" and loss is not None and could_miss:
            judgement = "undecided"
            fewest = min(len(run.repeats[name]) for run in runs)
            needed = None if math.isinf(loss) else math.ceil(fewest * (loss / slowest) ** 2)
            reason = _undecided(needed, limit)
        yield Judged(
            workload=workload,
            configuration=name,
            judgement=judgement,
            reason=reason,
            ratio=None if pair is None else _ratio(pair, judgement == "slower"),
            detectable=None if loss is None else -math.expm1(slowest - loss),
            needed_repeats=needed,
        )


def _undecided(needed: int | None, limit: float) -> str:
    expected = f"a slowdown of {100 * limit:.3g} % could not have been seen"
    if needed is None:
        return f"{expected}: perhaps all of its repeats were disturbed; measure more repeats"
    return f"{expected}; measure about {needed} repeats in both runs"


def _ratio(found: Belief, is_slower: bool) -> Interval:
    return found.estimate(is_tested=is_slower).exponential()


def _judgement(found: Belief | None, difference: str | None) -> tuple[Judgement, str | None]:
    """Judge a configuration without its speed. difference: from the training of the baseline."""
    if found is None:
        return "no result", "it did not finish in the later run"
    if difference is not None:
        return "not equivalent", difference
    if not found.has_noise:
        return "no result", "its noise is unknown; measure at least two repeats in both runs"
    return "passed", None


def _other_training(workload: str, before: RunSpeeds, after: RunSpeeds) -> str | None:
    """Return how the later baseline trained differently; None if it did not, or it is unknown."""
    if workload not in before.baselines or workload not in after.baselines:
        return None
    return why_other_training(before.baselines[workload], after.baselines[workload])


def _detectable_loss(found: Belief, family: int) -> float:
    """Return how far below the limit the test of one of a family finds a speed in most cases."""
    level = _LEVEL / family
    return found.detectable_loss(level * (1 - RISK_SHARE), level * RISK_SHARE)
