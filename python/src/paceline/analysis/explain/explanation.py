"""The explanation of a pair of configurations as values; `to_json` gives the document.

Whether two configurations differ is not decided here, but by their speeds, with the test of
`paceline compare`. The time of each part of a step is an estimate of the same model.

Each cause has an upper bound: the time that its evidence can explain, at most the time by which the
parts on which it acts became longer. A cause is named only if its evidence differs significantly
from zero over the repeats, and if its bound is at least a tenth of the difference. Bounds may
overlap, because two causes may act on one part and nothing tells which came first. Causes whose
evidence is a time come first; the others were merely there. What all bounds together do not reach
is unexplained. Shares are those of the time by which parts became longer, also where other parts
became shorter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from paceline.analysis.explain.evidence import (
    ALL_FIGURES,
    CAUSE_PARTS,
    HARDWARE_COUNTERS,
    PART_LABELS,
    PART_NAMES,
    ExplainedTrials,
    StepMeasurement,
    mean_measurement,
)
from paceline.analysis.explain.rules import MEASURED, RULES, Factor, Pair
from paceline.analysis.statistics.intervals import Estimate, Mean
from paceline.analysis.statistics.model import Belief, fit, unknown
from paceline.measure.records.files import jsonable
from paceline.measure.records.phases import ALL_PHASES

Repeats = Mapping[int, StepMeasurement]

SPREAD = "spread"  # over parts of which none is significantly longer
CAUSE_BOUNDS = "upper bounds; they may overlap"
EXPLAIN_SCHEMA = 3  # of `paceline explain --json`
EXPLAINS = 0.5  # of the difference: a part or cause that explains less is not the main one
LEAST_SHARE = 0.1  # of the difference: smaller causes are not named
_LEAST_PART = 0.01  # of the difference: less in a part is not worth its name
_JSON_NAMES = {
    "is_significant": "significant",
    "repeats": "common_repeats",
    "factors": "time_on_cores",
    "outside_steps": "outside_steps_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a step in two configurations, seconds per step."""

    part: str
    label: str
    faster_s: float
    slower_s: float
    difference_s: Mean
    share: float | None  # of the whole difference; None where that is not significant


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause of a difference, and the most that its evidence can explain."""

    name: str
    label: str
    parts: tuple[str, ...]  # of CAUSE_PARTS: it acts on them, and they are longer
    at_most_s: float  # per step; the bounds of several causes may overlap
    share: float  # of the time by which parts became longer
    is_measured: bool  # the evidence is a time; False: the cause was there
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexplained:
    """The least time that the causes together do not explain, per step."""

    parts: tuple[str, ...]  # of CAUSE_PARTS, or SPREAD
    at_least_s: float
    share: float  # of the time by which parts became longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why one configuration takes longer per step than another."""

    faster: str
    slower: str
    faster_s: float  # of a step
    slower_s: float
    difference_s: Mean
    is_significant: bool
    repeats: int  # common to both; 0: different runs, not paired
    parts: tuple[Part, ...]  # they add up to the step
    factors: tuple[Factor, ...]  # of the time on cores; empty without CPU times in the traces
    causes: tuple[Cause, ...]  # measured ones first, then by their bounds
    unexplained: Unexplained | None  # None if the difference is not significant
    evidence: tuple[dict[str, Any], ...]  # figures of both: name, label, unit, faster, slower
    outside_steps: tuple[dict[str, Any], ...] = ()  # per trial: phase, faster_s, slower_s
    without_straggler: bool = False  # the parts leave out the rank with the largest delay

    def part(self, name: str) -> Part:
        return self.parts[PART_NAMES.index(name)]

    @property
    def main_cause(self) -> Cause | None:
        """The first cause that can explain half of the difference, else the one with most."""
        enough = (cause for cause in self.causes if cause.share >= EXPLAINS)
        most = max(self.causes, key=lambda cause: cause.at_most_s, default=None)
        return next(enough, most)

    def to_json(self) -> dict[str, Any]:
        """Return the document of `paceline explain --json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        document: dict[str, Any] = jsonable(
            {
                "schema": EXPLAIN_SCHEMA,
                "cause_bounds": CAUSE_BOUNDS,
                "hardware_counters": HARDWARE_COUNTERS,
            }
            | {_JSON_NAMES.get(name, name): value for name, value in values.items()}
        )
        return document


def explain(
    first: ExplainedTrials,
    second: ExplainedTrials,
    log_ratio: Estimate | None,
    *,
    paired: bool = True,
    may_differ: bool = True,
    disturbed: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> Explanation:
    """Explain the difference of two configurations of one workload.

    log_ratio: log(speed of the first / speed of the second), of the comparison; None if the noise
    is unknown, which names no cause. paired: False for trials of different runs, whose repeats have
    nothing in common. may_differ: False if a test of several configurations does not separate them.
    disturbed: repeats of a configuration that are left out, because other work slowed them.
    """
    without = any(side.straggler is not None for side in (first, second))
    sides = [
        _undisturbed(side.repeats(without_latest=without), disturbed.get(side.name, ()))
        for side in (first, second)
    ]
    is_reversed = (
        _mean_step_s(sides[0]) > _mean_step_s(sides[1])
        if log_ratio is None
        else log_ratio.value < 0
    )
    if is_reversed:
        first, second, sides = second, first, sides[::-1]
        log_ratio = None if log_ratio is None else log_ratio.scaled(-1.0)
    found = explain_repeats(
        (first.name, second.name),
        (sides[0], sides[1]),
        log_ratio,
        paired=paired,
        may_differ=may_differ,
    )
    phases = [phase.name for phase in ALL_PHASES if not phase.in_step]
    outside = tuple(
        {"phase": n, "faster_s": first.outside_s.get(n), "slower_s": second.outside_s.get(n)}
        for n in phases
    )
    return replace(found, outside_steps=outside, without_straggler=without)


def explain_repeats(
    names: tuple[str, str],
    sides: tuple[Repeats, Repeats],
    log_ratio: Estimate | None,
    *,
    paired: bool = True,
    may_differ: bool = True,
) -> Explanation:
    """Explain measurements by repeat, see `explain`. The first side has the higher speed."""
    common = sorted(set(sides[0]) & set(sides[1])) if paired else []
    faster, slower = ([side[repeat] for repeat in (common or side)] for side in sides)
    mean = Pair(faster=mean_measurement(faster), slower=mean_measurement(slower))
    step_s = mean.faster.step_s, mean.slower.step_s

    def difference(name: str) -> Mean:
        seconds = [[each.part_s(name) for each in side] for side in (faster, slower)]
        ours, theirs = time_beliefs(seconds, step_s[0], paired=bool(common))
        bounds = (ours - theirs).estimate().scaled(step_s[0])
        longer_s = mean.slower.part_s(name) - mean.faster.part_s(name)
        return Mean(mean=longer_s, low=min(bounds.low, longer_s), high=max(bounds.high, longer_s))

    whole_s = _in_seconds(step_s, log_ratio)
    is_significant = may_differ and whole_s.low > 0
    parts = tuple(
        Part(
            part=name,
            label=PART_LABELS[name],
            faster_s=mean.faster.part_s(name),
            slower_s=mean.slower.part_s(name),
            difference_s=(of_part := difference(name)),
            share=of_part.mean / whole_s.mean if is_significant else None,
        )
        for name in PART_NAMES
    )
    causes: tuple[Cause, ...] = ()
    unexplained = None
    if is_significant:
        pairs = [Pair(faster=a, slower=b) for a, b in zip(faster, slower, strict=False)]
        longer = {name: difference(name) for name in CAUSE_PARTS}
        longer_s = {name: found.mean for name, found in longer.items() if found.low > 0}
        causes, unexplained = name_causes(mean, pairs, longer_s, whole_s.mean)
    return Explanation(
        faster=names[0],
        slower=names[1],
        faster_s=step_s[0],
        slower_s=step_s[1],
        difference_s=whole_s,
        is_significant=is_significant,
        repeats=len(common),
        parts=parts,
        factors=mean.factors(),
        causes=causes,
        unexplained=unexplained,
        evidence=tuple(
            {
                **{key: getattr(figure, key) for key in ("name", "label", "unit")},
                "faster": mean.faster.figures.get(figure.name),
                "slower": mean.slower.figures.get(figure.name),
            }
            for figure in ALL_FIGURES
        ),
    )


def name_causes(
    mean: Pair, repeats: Sequence[Pair], longer_s: Mapping[str, float], whole_s: float
) -> tuple[tuple[Cause, ...], Unexplained]:
    """Return the causes of a significant difference, and what they do not explain.

    mean: of the repeats; gives the evidence. longer_s: by how much each significant part is longer.
    """
    total_s = max(whole_s, sum(longer_s.values()))
    causes = []
    for rule in RULES:
        seconds = [rule.find(pair)[0] for pair in repeats]
        (found,) = time_beliefs([seconds], mean.faster.step_s)
        limit = found.estimate().scaled(-mean.faster.step_s)
        if limit.low <= 0:
            continue
        parts = tuple(part for part in rule.acts_on if part in longer_s)
        at_most_s = min(limit.value, sum(longer_s[part] for part in parts))
        if at_most_s >= LEAST_SHARE * total_s:
            cause = Cause(
                name=rule.name,
                label=rule.label,
                parts=parts,
                at_most_s=at_most_s,
                share=at_most_s / total_s,
                is_measured=rule in MEASURED,
                evidence=tuple(rule.find(mean)[1]),
            )
            causes.append(cause)
    causes.sort(key=lambda cause: (not cause.is_measured, -cause.at_most_s))
    return tuple(causes), _unexplained(causes, longer_s, total_s)


def _unexplained(
    causes: Sequence[Cause], longer_s: Mapping[str, float], total_s: float
) -> Unexplained:
    """Return the least that stays unexplained: in each part, and of all parts together."""
    rest_s = {
        part: max(0.0, seconds - sum(each.at_most_s for each in causes if part in each.parts))
        for part, seconds in longer_s.items()
    }
    together_s = sum(longer_s.values()) - sum(each.at_most_s for each in causes)
    spread_s = total_s - sum(longer_s.values())
    at_least_s = max(together_s, sum(rest_s.values())) + spread_s
    places = rest_s | {SPREAD: spread_s}
    return Unexplained(
        parts=tuple(part for part, each in places.items() if each >= _LEAST_PART * total_s),
        at_least_s=at_least_s,
        share=at_least_s / total_s,
    )


def _in_seconds(step_s: tuple[float, float], log_ratio: Estimate | None) -> Mean:
    """Return the difference of the steps, with the interval of the ratio of the speeds."""
    mean_s = step_s[1] - step_s[0]
    if log_ratio is None or math.isinf(log_ratio.high):
        return Mean(mean=mean_s, low=-math.inf, high=math.inf)
    low, high = (step_s[0] * math.expm1(bound) for bound in (log_ratio.low, log_ratio.high))
    return Mean(mean=mean_s, low=min(mean_s, low), high=max(mean_s, high))


def time_beliefs(
    seconds: Sequence[Sequence[float]], step_s: float, *, paired: bool = True
) -> list[Belief]:
    """Return minus the time of each side as a share of `step_s`, by the model of the speeds.

    It has the same assumption: a disturbance can only make a part longer. paired: the values of two
    sides at one place were measured in the same repeat.
    """
    columns = max(map(len, seconds)) if paired else sum(map(len, seconds))
    table, begin = np.full((len(seconds), columns), np.nan), 0
    for row, side in zip(table, seconds, strict=True):
        row[begin : begin + len(side)] = -np.array(side) / step_s
        begin += 0 if paired else len(side)
    found = fit(table)
    beliefs = [None] * len(table) if found is None else found.speeds
    return [unknown(0.0) if belief is None else belief for belief in beliefs]


def _undisturbed(repeats: Repeats, disturbed: Collection[int]) -> Repeats:
    left = {number: each for number, each in repeats.items() if number not in disturbed}
    return left or repeats


def _mean_step_s(repeats: Repeats) -> float:
    return float(np.mean([each.step_s for each in repeats.values()]))
