"""Influence of the local strategy on the global speed: strategies alone and under launchers.

A strategy here is everything that a node does: its kind, replicas, stages, threads, micro-batches,
schedule and split points. Its speedup alone is measured under launcher `local`, and compared with
the speedups under each other launcher and number of nodes. If a strategy ran there in several
configurations (for example with several transports), the fastest counts. Speedups are compared
within one precision and memory format; trials that are not equivalent are left out.

Figures of a node, such as its CPU use, are compared with the speedups of all these trials.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from pydantic import computed_field
from pydantic.dataclasses import dataclass

from paceline.analysis.compare.row import Row
from paceline.analysis.statistics.fastest import Fastest
from paceline.analysis.statistics.intervals import Interval, RankCorrelation, holm, rank_correlation
from paceline.analysis.trial.usage import HostUsage

Ratio = Callable[[str, str], Interval | None]
FindFastest = Callable[[Iterable[str]], Fastest]


NODE_FIGURES: dict[str, Callable[[HostUsage], float | None]] = {
    "cpu_percent": lambda usage: usage.cpu_percent,
    "threads_median": lambda usage: usage.threads_median,
    "ram_percent_mean": lambda usage: usage.ram_percent_mean,
    "iowait_percent": lambda usage: usage.iowait_percent,
    "context_switches_per_s": lambda usage: usage.context_switches_per_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A strategy under another launcher."""

    launcher: str
    nodes: int
    configuration: str
    speedup: Interval
    ratio: Interval | None  # its speed over that of the strategy alone


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyLine:
    """A strategy alone, and everywhere else."""

    configuration: str  # under launcher `local`
    speedup: Interval
    elsewhere: tuple[Elsewhere, ...]

    def under(self, launcher: str, nodes: int) -> Elsewhere | None:
        return next((e for e in self.elsewhere if (e.launcher, e.nodes) == (launcher, nodes)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Rank correlation of strategies alone and under one launcher.

    Strategies are named by their configurations under launcher `local`. `not_separated_*`: those
    that may be the fastest as well, without the fastest measured one.
    """

    launcher: str
    nodes: int
    strategies: int  # that ran in both places
    rank_correlation: float | None  # Spearman's; None for fewer than 3, or if all are equal
    p_value: float | None  # of the correlation, by a permutation test
    is_significant: bool = False  # at 5 %, among all places of the workload (Holm)
    fastest_alone: str
    not_separated_alone: tuple[str, ...]
    fastest_there: str
    not_separated_there: tuple[str, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def same_fastest(self) -> bool | None:
        """Tell whether the fastest alone is the fastest there; None if that is not significant."""
        alone = {self.fastest_alone, *self.not_separated_alone}
        there = {self.fastest_there, *self.not_separated_there}
        if not alone & there:
            return False
        return True if len(alone) == len(there) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGlobal:
    """One workload's strategies alone and under other launchers, in one arithmetic."""

    workload: str
    precision: str
    memory_format: str
    lines: tuple[StrategyLine, ...]  # fastest alone first
    relations: tuple[Relation, ...]  # a column each


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRelation:
    """Rank correlation of a figure of the nodes and the speedup of the configurations."""

    workload: str
    figure: str  # field of Row
    configurations: int
    rank_correlation: float
    p_value: float  # by a permutation test
    is_significant: bool  # at 5 %, among all figures of the workload (Holm)


def relate_figures(workload: str, rows: Sequence[Row]) -> tuple[FigureRelation, ...]:
    """Compare the speedups of one workload with each figure that is known of enough rows.

    rows: equivalent configurations.
    """
    found: dict[str, tuple[int, RankCorrelation]] = {}
    for figure, figure_of in NODE_FIGURES.items():
        pairs = [
            (value, row.speed.speedup.estimate)
            for row in rows
            if row.speed.speedup is not None and (value := figure_of(row.usage)) is not None
        ]
        correlation = rank_correlation(*np.array(pairs).reshape(-1, 2).T)
        if correlation is not None:
            found[figure] = len(pairs), correlation
    significant = holm({figure: each.p_value for figure, (_, each) in found.items()})
    return tuple(
        FigureRelation(
            workload=workload,
            figure=figure,
            configurations=count,
            rank_correlation=each.correlation,
            p_value=each.p_value,
            is_significant=figure in significant,
        )
        for figure, (count, each) in found.items()
    )


def relate(
    workload: str,
    rows: Sequence[Row],
    setups: Mapping[str, Hashable],
    ratio: Ratio,
    find_fastest: FindFastest,
) -> tuple[LocalGlobal, ...]:
    """Compare the strategies of one workload alone and under other launchers.

    rows: equivalent configurations. setups: what a node does, by configuration. ratio: of the
    speeds of two configurations. find_fastest: compares some configurations with the fastest.
    Returns one value for each arithmetic; none if no two strategies ran both alone and elsewhere.
    """
    by_arithmetic: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.speed.speedup is not None:
            by_arithmetic[row.training.precision, row.training.memory_format].append(row)
    found = []
    for (precision, memory_format), same in by_arithmetic.items():
        lines = _lines(same, setups, ratio)
        places = list(dict.fromkeys((e.launcher, e.nodes) for li in lines for e in li.elsewhere))
        relations = [_relation(lines, place, find_fastest) for place in sorted(places)]
        if known := _tested([r for r in relations if r is not None]):
            found.append(
                LocalGlobal(
                    workload=workload,
                    precision=precision,
                    memory_format=memory_format,
                    lines=lines,
                    relations=known,
                )
            )
    return tuple(found)


def _tested(relations: Sequence[Relation]) -> tuple[Relation, ...]:
    """Test the correlations of all places together."""
    places = {f"{each.launcher} {each.nodes}": each for each in relations}
    p_values = {name: each.p_value for name, each in places.items() if each.p_value is not None}
    significant = holm(p_values)
    return tuple(replace(each, is_significant=name in significant) for name, each in places.items())


def _lines(
    rows: Sequence[Row], setups: Mapping[str, Hashable], ratio: Ratio
) -> tuple[StrategyLine, ...]:
    alone: dict[Hashable, Row] = {}
    there: dict[Hashable, dict[tuple[str, int], Row]] = defaultdict(dict)
    for row in sorted(rows, key=_speed, reverse=True):  # so that the fastest is met first
        if row.setup.launcher == "local":
            alone.setdefault(setups[row.configuration], row)
        else:
            there[setups[row.configuration]].setdefault(
                (row.setup.launcher, row.placement.nodes), row
            )
    return tuple(
        StrategyLine(
            configuration=row.configuration,
            speedup=row.speed.speedup,
            elsewhere=tuple(
                Elsewhere(
                    launcher=launcher,
                    nodes=nodes,
                    configuration=other.configuration,
                    speedup=other.speed.speedup,
                    ratio=ratio(other.configuration, row.configuration),
                )
                for (launcher, nodes), other in sorted(there[way].items())
                if other.speed.speedup is not None
            ),
        )
        for way, row in alone.items()
        if row.speed.speedup is not None
    )


def _speed(row: Row) -> float:
    return 0.0 if row.speed.speedup is None else row.speed.speedup.estimate


def _relation(
    lines: Sequence[StrategyLine], place: tuple[str, int], find_fastest: FindFastest
) -> Relation | None:
    launcher, nodes = place
    pairs = [(line, e) for line in lines if (e := line.under(launcher, nodes)) is not None]
    if len(pairs) < 2:
        return None
    strategies = {e.configuration: line.configuration for line, e in pairs}
    alone, there = find_fastest(strategies.values()), find_fastest(strategies)
    if alone.leader is None or there.leader is None:
        return None
    correlation = rank_correlation(
        np.array([line.speedup.estimate for line, _ in pairs]),
        np.array([e.speedup.estimate for _, e in pairs]),
    )
    return Relation(
        launcher=launcher,
        nodes=nodes,
        strategies=len(pairs),
        rank_correlation=None if correlation is None else correlation.correlation,
        p_value=None if correlation is None else correlation.p_value,
        fastest_alone=alone.leader,
        not_separated_alone=alone.not_separated,
        fastest_there=strategies[there.leader],
        not_separated_there=tuple(strategies[name] for name in there.not_separated),
    )
