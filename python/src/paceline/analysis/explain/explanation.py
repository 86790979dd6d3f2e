"""The explanation of a pair of configurations as values; `to_json` gives the document.

Whether two configurations differ is not decided here, but by their speeds, with the test of
`paceline compare`. Parts of a step are tested with their differences within common repeats.

How causes share a difference. Each rule limits its cause to the time that its evidence can explain.
A cause is considered only if this time differs significantly from zero over the repeats, and is at
least a tenth of the difference. Then each cause offers its time to the parts on which it acts:

- in proportion to what is open there, first where no narrower cause needs it, so that the causes
  together explain as much as they can;
- a part that is offered more than it has takes the same share of each offer, because nothing tells
  which cause came first; what a cause has left is offered again;
- causes whose evidence is a time come before those that were merely there, with an upper bound.

So no cause exceeds its evidence, and all together do not exceed a part. The rest is unexplained.
Shares are those of the time by which parts became longer, so they add up to 100 %, also where other
parts became shorter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.explain.evidence import ALL_FIGURES, HARDWARE_COUNTERS
from paceline.analysis.explain.parts import (
    CAUSE_PARTS,
    PART_LABELS,
    PART_NAMES,
    ExplainedTrials,
    Measurement,
    mean_measurement,
)
from paceline.analysis.explain.rules import RULES, Factor, Pair, Rule
from paceline.analysis.statistics.intervals import (
    Estimate,
    Mean,
    estimate,
    mean_interval,
    welch_difference,
)
from paceline.records.files import jsonable
from paceline.records.phases import ALL_PHASES
from paceline.records.rows import SCHEMA

Repeats = Mapping[int, Measurement]

UNEXPLAINED = "unexplained"
SPREAD = "spread"  # over parts of which none is significantly longer
LEAST_SHARE = 0.1  # of the difference: smaller causes are not named
_LEAST_PART = 0.01  # of the difference: less in a part is not worth its name
_ROUNDS = 20  # of offers; what is left becomes smaller by a factor each time
_NOTHING_S = 1e-12
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
    """A cause of a difference, or what no evidence explains."""

    name: str
    label: str
    parts: tuple[str, ...]  # of CAUSE_PARTS, or SPREAD
    difference_s: float  # per step
    share: float  # of the time by which parts became longer
    evidence: tuple[str, ...]
    has_evidence: bool = True


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
    causes: tuple[Cause, ...]  # with evidence, largest first
    unexplained: Cause | None  # None if the difference is not significant
    evidence: tuple[dict[str, Any], ...]  # figures of both: name, label, unit, faster, slower
    outside_steps: tuple[dict[str, Any], ...] = ()  # per trial: phase, faster_s, slower_s
    without_straggler: bool = False  # the parts leave out the rank with the largest delay

    def part(self, name: str) -> Part:
        return self.parts[PART_NAMES.index(name)]

    def to_json(self) -> dict[str, Any]:
        """Return the document of `paceline explain --json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["unexplained"]
        values["causes"] = [*self.causes, *([self.unexplained] if self.unexplained else [])]
        document: dict[str, Any] = jsonable(
            {"schema": SCHEMA, "hardware_counters": HARDWARE_COUNTERS}
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
) -> Explanation:
    """Explain the difference of two configurations of one workload.

    log_ratio: log(speed of the first / speed of the second), of the comparison; None if the noise
    is unknown, which names no cause. paired: False for trials of different runs, whose repeats have
    nothing in common. may_differ: False if a test of several configurations does not separate them.
    """
    if log_ratio is not None and log_ratio.value < 0:
        return explain(second, first, log_ratio.negated(), paired=paired, may_differ=may_differ)
    without = any(side.straggler is not None for side in (first, second))
    sides = [side.repeats(without_latest=without) for side in (first, second)]
    if log_ratio is None and _mean_step_s(sides[0]) > _mean_step_s(sides[1]):
        return explain(second, first, None, paired=paired)
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

    def difference(name: str) -> Mean:
        ours, theirs = (np.array([m.part_s(name) for m in side]) for side in (faster, slower))
        if common:
            return _interval(theirs - ours).as_mean()
        return welch_difference(_interval(ours), _interval(theirs)).as_mean()

    step_s = mean.faster.step_s, mean.slower.step_s
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
) -> tuple[tuple[Cause, ...], Cause]:
    """Return the causes of a significant difference, largest first, and what stays unexplained.

    mean: of the repeats; gives the evidence. longer_s: by how much each significant part is longer.
    """
    total_s = max(whole_s, sum(longer_s.values()))
    limits_s = {}
    for rule in (rule for rules in RULES for rule in rules if {*rule.acts_on} & {*longer_s}):
        limit = mean_interval(np.array([rule.find(pair)[0] for pair in repeats]))
        if limit is not None and limit.low > 0 and limit.value >= LEAST_SHARE * total_s:
            limits_s[rule] = limit.value
    open_s, found = dict(longer_s), []
    for rules in RULES:
        taken = _share_out(limits_s, rules, open_s)
        while taken:
            least = min(taken, key=lambda rule: sum(taken[rule].values()))
            if sum(taken[least].values()) >= LEAST_SHARE * total_s:
                break
            del limits_s[least]  # too small, so the others share what it was offered
            taken = _share_out(limits_s, rules, open_s)
        for rule, parts in taken.items():
            del limits_s[rule]
            open_s = {name: left - parts.get(name, 0.0) for name, left in open_s.items()}
            found.append(_cause(rule.name, rule.label, parts, total_s, rule.find(mean)[1]))
    open_s[SPREAD] = total_s - sum(longer_s.values())
    rest = _cause(UNEXPLAINED, "unexplained", open_s, total_s, [])
    return tuple(sorted(found, key=lambda cause: -cause.difference_s)), rest


def _share_out(
    limits_s: Mapping[Rule, float], rules: Sequence[Rule], open_s: Mapping[str, float]
) -> dict[Rule, dict[str, float]]:
    """Return what each of the rules gets of each part, see above.

    limits_s: of these rules and of those that follow, which need room, too.
    """
    rest_s, left_s = dict(open_s), {rule: limits_s[rule] for rule in rules if rule in limits_s}
    places = {rule: [name for name in rule.acts_on if name in open_s] for rule in limits_s}
    taken = {rule: dict.fromkeys(places[rule], 0.0) for rule in left_s}
    for number in range(2 * _ROUNDS):
        offers = {}
        for rule, offered_s in left_s.items():
            room = {name: rest_s[name] for name in places[rule]}
            if number < _ROUNDS:
                for other in (r for r in limits_s if len(places[r]) < len(places[rule])):
                    needed_s = left_s.get(other, limits_s[other])
                    room |= {n: room[n] - needed_s for n in places[other] if n in room}
            room = {name: max(0.0, seconds) for name, seconds in room.items()}
            of_s = max(sum(room.values()), _NOTHING_S)
            offers[rule] = {name: offered_s * each / of_s for name, each in room.items()}
        for name, available_s in rest_s.items():
            all_s = sum(offer.get(name, 0.0) for offer in offers.values())
            accepted = min(1.0, available_s / max(all_s, _NOTHING_S))
            for rule, offer in offers.items():
                got_s = accepted * offer.get(name, 0.0)
                if got_s > 0:
                    taken[rule][name] += got_s
                    left_s[rule] -= got_s
            rest_s[name] -= accepted * all_s
    return taken


def _cause(
    name: str, label: str, parts: Mapping[str, float], total_s: float, evidence: Sequence[str]
) -> Cause:
    seconds = max(0.0, sum(parts.values()))
    return Cause(
        name=name,
        label=label,
        parts=tuple(part for part, each in parts.items() if each >= _LEAST_PART * total_s),
        difference_s=seconds,
        share=seconds / total_s,
        evidence=tuple(evidence),
        has_evidence=name != UNEXPLAINED,
    )


def _in_seconds(step_s: tuple[float, float], log_ratio: Estimate | None) -> Mean:
    """Return the difference of the steps, with the interval of the ratio of the speeds."""
    mean_s = step_s[1] - step_s[0]
    if log_ratio is None or math.isinf(log_ratio.high):
        return Mean(mean=mean_s, low=-math.inf, high=math.inf)
    low, high = (step_s[0] * math.expm1(bound) for bound in (log_ratio.low, log_ratio.high))
    return Mean(mean=mean_s, low=min(mean_s, low), high=max(mean_s, high))


def _interval(values: NDArray[np.float64]) -> Estimate:
    return mean_interval(values) or estimate(0.0, math.inf, 0)


def _mean_step_s(repeats: Repeats) -> float:
    return float(np.mean([each.step_s for each in repeats.values()]))
