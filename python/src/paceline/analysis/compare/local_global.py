"""Influence of the node-local strategy on the speed of several nodes.

A strategy here is everything that a node does: its kind, replicas, stages, threads, micro-batches,
schedule and split points. Its local speedup is measured on one node, its global speedup on several
ones, both over the baseline: global speedup = nodes x local speedup x efficiency between nodes.

On one node, launcher `local` counts before the others, and of several transports the fastest. On
several nodes, strategies are compared within one place: launcher, transport, number of nodes, and
options. They are compared within one precision and memory format; trials that are not equivalent
are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from paceline.analysis.compare.from_one_node import FromOneNode, predict_from_one_node
from paceline.analysis.compare.places import LauncherGap, Place, launcher_gaps, place_of
from paceline.analysis.compare.ranking import Ranking
from paceline.analysis.compare.row import Row
from paceline.analysis.compare.traces import TraceRelations, relate_traces
from paceline.analysis.explain.explanation import EXPLAINS
from paceline.analysis.statistics.fastest import reversed_orders
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.statistics.model import Belief
from paceline.analysis.statistics.rates import RunRates
from paceline.analysis.trial.reading import TrialRecord, node_setup
from paceline.analysis.trial_analysis import TrialAnalysis

_ALONE = ("local", "torchrun")  # launchers that count on one node before all others
STEP_PARTS = {
    "computation": ("forward", "backward", "optimizer"),
    "exchange": ("comm_transfer",),
    "waiting": ("comm_wait",),
    "bubble": ("bubble",),
    "rest": ("data_wait", "other"),
}
Parts = dict[str, float]  # seconds of a step by STEP_PARTS; empty if they were not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNodes:
    """A strategy on several nodes."""

    place: Place
    configuration: str
    speedup: Interval  # global: over the baseline
    efficiency: Interval | None  # between nodes; None without a repeat in common
    parts_s: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyLine:
    """A strategy on one node and everywhere else."""

    configuration: str  # on one node
    speedup: Interval  # local: over the baseline
    parts_s: Parts
    several: tuple[OnNodes, ...]

    def at(self, place: Place) -> OnNodes | None:
        return next((each for each in self.several if each.place == place), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAnswer:
    """The order of the strategies at one place, and on one node.

    Strategies are named by their configurations on one node. `not_separated_*`: those that may be
    the fastest as well, without the fastest measured one.
    """

    place: Place
    strategies: int
    fastest_alone: str
    not_separated_alone: tuple[str, ...]
    fastest_there: str
    not_separated_there: tuple[str, ...]
    slowest_there: str | None  # of those that are separated from the fastest
    over_slowest: Interval | None  # speed of the fastest over that of the slowest
    matters: bool | None  # False: all are shown to be equally fast; None: undecided
    same_fastest: bool | None  # None: undecided


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderChange:
    """Two strategies whose order at a place is shown to be another one than on one node.

    ahead_alone, ahead_there: their configurations on one node. part: the part of a step that makes
    at least half of the difference there, and changed it most; None: several parts.
    """

    place: Place
    ahead_alone: str
    ahead_there: str
    alone: Interval  # speed of ahead_alone over that of ahead_there, on one node
    there: Interval  # speed of ahead_there over that of ahead_alone, at the place
    part: str | None = None
    longer_s: float | None = None  # the part of ahead_alone there
    shorter_s: float | None = None  # the part of ahead_there there


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGlobal:
    """One workload's strategies on one node and on several, in one arithmetic."""

    workload: str
    precision: str
    memory_format: str
    lines: tuple[StrategyLine, ...]  # fastest on one node first
    answers: tuple[PlaceAnswer, ...]
    changes: tuple[OrderChange, ...]  # the largest first
    gaps: tuple[LauncherGap, ...]  # Spark over MPI
    traces: TraceRelations | None
    from_one_node: FromOneNode

    @property
    def places(self) -> list[Place]:
        return [answer.place for answer in self.answers]


def relate(
    workload: str,
    rows: Sequence[Row],
    trials: Mapping[str, Sequence[TrialAnalysis]],
    ranking: Ranking,
    shares: Sequence[TrialRecord] = (),
) -> tuple[LocalGlobal, ...]:
    """Compare the strategies of one workload on one node and on several.

    rows: equivalent configurations. trials: by configuration. ranking: by speed. shares:
    finished trials of one node with the batch of a node's share. Returns one value for each
    arithmetic; none if no two strategies ran both on one node and at another place.
    """
    by_arithmetic: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.speed.speedup is not None:
            by_arithmetic[row.training.precision, row.training.memory_format].append(row)
    found = []
    for (precision, memory_format), same in by_arithmetic.items():
        lines = _lines(same, trials, ranking.rates)
        at_places = _at_places(lines)
        if not at_places:
            continue
        level = ranking.level / len(at_places)
        answers = [_answer(place, at, ranking, level) for place, at in at_places.items()]
        found.append(
            LocalGlobal(
                workload=workload,
                precision=precision,
                memory_format=memory_format,
                lines=lines,
                answers=tuple(answers),
                changes=_changes(lines, at_places, ranking),
                gaps=launcher_gaps(same, trials, ranking.rates),
                traces=relate_traces(_observed(lines, at_places), trials),
                from_one_node=predict_from_one_node(
                    same, _alone_of(same, lines, trials), trials, ranking, shares
                ),
            )
        )
    return tuple(found)


Pairs = Mapping[str, OnNodes]  # strategies at one place, by their configurations on one node


def _lines(
    rows: Sequence[Row], trials: Mapping[str, Sequence[TrialAnalysis]], rates: RunRates
) -> tuple[StrategyLine, ...]:
    alone: dict[Hashable, Row] = {}
    several: dict[Hashable, dict[Place, Row]] = defaultdict(dict)
    for row in sorted(rows, key=_preference):
        trial = trials[row.configuration][0].record.trial
        if row.placement.nodes == 1:
            alone.setdefault(node_setup(trial), row)
        else:
            several[node_setup(trial)].setdefault(place_of(trial), row)
    found = [_line(row, several[setup], rates) for setup, row in alone.items()]
    return tuple(sorted(found, key=lambda line: -line.speedup.estimate))


def _alone_of(
    rows: Sequence[Row],
    lines: Sequence[StrategyLine],
    trials: Mapping[str, Sequence[TrialAnalysis]],
) -> dict[str, str | None]:
    """Return the configuration on one node of each on several; None without one."""

    def setup(name: str) -> Hashable:
        return node_setup(trials[name][0].record.trial)

    alone = {setup(line.configuration) for line in lines}
    several = [row.configuration for row in rows if row.placement.nodes > 1]
    return {
        **{name: None for name in several if setup(name) not in alone},
        **{each.configuration: line.configuration for line in lines for each in line.several},
    }


def _preference(row: Row) -> tuple[int, float]:
    """Sort by launcher, then by speed."""
    launcher = row.setup.launcher
    order = _ALONE.index(launcher) if launcher in _ALONE else len(_ALONE)
    return order, -_speedup(row).estimate


def _speedup(row: Row) -> Interval:
    assert row.speed.speedup is not None, "`relate` leaves out the others"
    return row.speed.speedup


def _line(alone: Row, several: Mapping[Place, Row], rates: RunRates) -> StrategyLine:
    there = []
    for place, row in sorted(several.items(), key=lambda item: item[0].order):
        ratio = rates.ratio(row.configuration, alone.configuration)
        there.append(
            OnNodes(
                place=place,
                configuration=row.configuration,
                speedup=_speedup(row),
                efficiency=None if ratio is None else ratio.scaled(1 / place.nodes),
                parts_s=_parts_s(row),
            )
        )
    return StrategyLine(
        configuration=alone.configuration,
        speedup=_speedup(alone),
        parts_s=_parts_s(alone),
        several=tuple(there),
    )


def _parts_s(row: Row) -> Parts:
    phases = row.times.step_phases_s
    if phases.get("forward") is None:
        return {}
    return {part: sum(phases.get(n) or 0.0 for n in names) for part, names in STEP_PARTS.items()}


def _at_places(lines: Sequence[StrategyLine]) -> dict[Place, Pairs]:
    """Return the strategies at each place that has at least two, in order of the places."""
    found: dict[Place, dict[str, OnNodes]] = defaultdict(dict)
    for line in lines:
        for each in line.several:
            found[each.place][line.configuration] = each
    return {
        place: found[place]
        for place in sorted(found, key=lambda place: place.order)
        if len(found[place]) > 1
    }


def _answer(place: Place, at: Pairs, ranking: Ranking, level: float) -> PlaceAnswer:
    rates, strategies = ranking.rates, {each.configuration: name for name, each in at.items()}
    alone = rates.fastest(at, level=level, margin=ranking.margin)
    there = rates.fastest(strategies, level=level, margin=ranking.margin)
    assert alone.leader is not None, "all have a speed"
    assert there.leader is not None, "all have a speed"
    apart = [each.name for each in there.separated]
    slowest = min(apart, key=lambda name: _estimate(rates, name), default=None)
    first = {alone.leader, *alone.not_separated}
    best = {strategies[name] for name in (there.leader, *there.not_separated)}
    same = None if first & best else False
    if len(first) == len(best) == 1:
        same = first == best
    are_ties = bool(there.ties) and set(there.ties) == set(there.not_separated)
    return PlaceAnswer(
        place=place,
        strategies=len(at),
        fastest_alone=alone.leader,
        not_separated_alone=alone.not_separated,
        fastest_there=strategies[there.leader],
        not_separated_there=tuple(strategies[name] for name in there.not_separated),
        slowest_there=None if slowest is None else strategies[slowest],
        over_slowest=None if slowest is None else rates.ratio(there.leader, slowest),
        matters=True if apart else False if are_ties else None,
        same_fastest=same,
    )


def _estimate(rates: RunRates, name: str) -> float:
    found = rates.relative(name)
    return 0.0 if found is None else found.value


def _changes(
    lines: Sequence[StrategyLine], at_places: Mapping[Place, Pairs], ranking: Ranking
) -> tuple[OrderChange, ...]:
    """Return the pairs whose order is shown to change, over all places together."""
    tested: dict[str, tuple[Belief, Belief]] = {}
    found: dict[str, OrderChange] = {}
    for place, at in at_places.items():
        here = [line for line in lines if line.configuration in at]  # fastest on one node first
        for first, second in combinations(here, 2):
            slow, fast = at[first.configuration], at[second.configuration]
            alone = _log_ratio(ranking.rates, first.configuration, second.configuration)
            there = _log_ratio(ranking.rates, slow.configuration, fast.configuration)
            if alone is None or there is None:
                continue
            key = f"{len(tested)}"
            tested[key] = alone, there
            part = _changed_part((first.parts_s, second.parts_s), (slow.parts_s, fast.parts_s))
            found[key] = OrderChange(
                place=place,
                ahead_alone=first.configuration,
                ahead_there=second.configuration,
                alone=alone.estimate().exponential(),
                there=there.estimate().exponential().inverse(),
                part=part,
                longer_s=None if part is None else slow.parts_s[part],
                shorter_s=None if part is None else fast.parts_s[part],
            )
    shown = reversed_orders(tested, level=ranking.level)
    changes = [change for key, change in found.items() if key in shown]
    return tuple(sorted(changes, key=lambda c: -min(c.alone.estimate, c.there.estimate)))


def _log_ratio(rates: RunRates, first: str, second: str) -> Belief | None:
    """Return the logarithm of first / second; None if no repeats connect them."""
    ours, theirs = rates.relative(first), rates.relative(second)
    if ours is None or theirs is None or rates.log_ratio(first, second) is None:
        return None
    return ours - theirs


def _changed_part(alone: tuple[Parts, Parts], there: tuple[Parts, Parts]) -> str | None:
    """Return the part by which the first of two strategies fell behind the other."""
    if not all((*alone, *there)):
        return None
    behind_s = {part: there[0][part] - there[1][part] for part in STEP_PARTS}
    before_s = {part: alone[0][part] - alone[1][part] for part in STEP_PARTS}
    longer = [part for part in STEP_PARTS if behind_s[part] > 0]
    part = max(longer, key=lambda part: behind_s[part] - before_s[part], default=None)
    if part is None or behind_s[part] < EXPLAINS * sum(behind_s.values()):
        return None
    return part


def _observed(
    lines: Sequence[StrategyLine], at_places: Mapping[Place, Pairs]
) -> Mapping[Place, Mapping[str, tuple[str, float, float]]]:
    """Return configuration, local and global speedup by place and strategy."""
    local = {line.configuration: line.speedup.estimate for line in lines}
    return {
        place: {
            name: (each.configuration, local[name], each.speedup.estimate)
            for name, each in at.items()
        }
        for place, at in at_places.items()
    }
