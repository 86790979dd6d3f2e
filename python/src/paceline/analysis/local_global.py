"""Does the choice inside the node decide the global speed? The same strategies, alone and launched.

A strategy is what a node does: its kind, replicas, stages, threads, micro-batches, schedule and
split points, whoever launches it. Its speedup alone is measured under launcher `local`. It stands
beside the speedups under each other launcher and number of nodes. Where a strategy ran in several
configurations there (several transports, say), its fastest counts. Speedups are compared within
one precision and memory format; trials that are not equivalent are left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.analysis.statistics import interval_json

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.row import Row
    from paceline.analysis.statistics import Interval

    # of two configurations: the first's speed over the second's
    Ratio = Callable[[str, str], Interval | None]

_LEAST_RANKED = 3  # two points are always in perfect order, or in perfect disorder


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
    """How the order of the strategies alone relates to their order under one launcher.

    Strategies go by their configurations under launcher `local`. `tied_*`: those that cannot be
    told from the fastest, it excepted.
    """

    launcher: str
    nodes: int
    strategies: int  # that ran in both places
    rank_correlation: float | None  # Spearman's; None for fewer than 3, or if all are equal
    fastest_alone: str
    tied_alone: tuple[str, ...]
    fastest_there: str
    tied_there: tuple[str, ...]

    @property
    def same_fastest(self) -> bool | None:
        """Whether the fastest alone is the fastest there; None where that is inside the noise."""
        alone = {self.fastest_alone, *self.tied_alone}
        there = {self.fastest_there, *self.tied_there}
        if not alone & there:
            return False
        return True if len(alone) == len(there) == 1 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "launcher": self.launcher,
            "nodes": self.nodes,
            "strategies": self.strategies,
            "rank_correlation": self.rank_correlation,
            "fastest_alone": self.fastest_alone,
            "tied_alone": list(self.tied_alone),
            "fastest_there": self.fastest_there,
            "tied_there": list(self.tied_there),
            "same_fastest": self.same_fastest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGlobal:
    """One workload's strategies alone and under other launchers, in one arithmetic."""

    workload: str
    precision: str
    memory_format: str
    lines: tuple[StrategyLine, ...]  # fastest alone first
    relations: tuple[Relation, ...]  # a column each

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "precision": self.precision,
            "memory_format": self.memory_format,
            "strategies": [
                {
                    "configuration": line.configuration,
                    "speedup": interval_json(line.speedup),
                    "elsewhere": [
                        {
                            "launcher": e.launcher,
                            "nodes": e.nodes,
                            "configuration": e.configuration,
                            "speedup": interval_json(e.speedup),
                            "ratio": interval_json(e.ratio),
                        }
                        for e in line.elsewhere
                    ],
                }
                for line in self.lines
            ],
            "relations": [relation.to_json() for relation in self.relations],
        }


def relate(workload: str, rows: Sequence[Row], ratio: Ratio) -> tuple[LocalGlobal, ...]:
    """Set the strategies of one workload against themselves under other launchers.

    rows: those that are the same training. ratio: of the speeds of two configurations.
    One value for each arithmetic; none where no two strategies ran both alone and elsewhere.
    """
    by_arithmetic: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.speedup is not None:
            by_arithmetic[row.precision, row.memory_format].append(row)
    found = []
    for (precision, memory_format), same in by_arithmetic.items():
        lines = _lines(same, ratio)
        places = list(dict.fromkeys((e.launcher, e.nodes) for li in lines for e in li.elsewhere))
        relations = [_relation(lines, place, ratio) for place in sorted(places)]
        if known := tuple(r for r in relations if r is not None):
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


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, equal values sharing their mean rank.

    None for fewer than 3 pairs, or where all values of a side are equal.
    """
    if len(first) < _LEAST_RANKED:
        return None
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else None


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 1, shape (n,); equal values have the mean of the ranks that they take up."""
    _, which, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[which]
    return ranks


def _lines(rows: Sequence[Row], ratio: Ratio) -> tuple[StrategyLine, ...]:
    alone: dict[Hashable, Row] = {}
    there: dict[Hashable, dict[tuple[str, int], Row]] = defaultdict(dict)
    for row in sorted(rows, key=_speed, reverse=True):  # so that the fastest is met first
        if row.launcher == "local":
            alone.setdefault(_node_way(row), row)
        else:
            there[_node_way(row)].setdefault((row.launcher, row.nodes), row)
    return tuple(
        StrategyLine(
            configuration=row.configuration,
            speedup=row.speedup,
            elsewhere=tuple(
                Elsewhere(
                    launcher=launcher,
                    nodes=nodes,
                    configuration=other.configuration,
                    speedup=other.speedup,
                    ratio=ratio(other.configuration, row.configuration),
                )
                for (launcher, nodes), other in sorted(there[way].items())
                if other.speedup is not None
            ),
        )
        for way, row in alone.items()
        if row.speedup is not None
    )


def _node_way(row: Row) -> Hashable:
    """What a node does, whoever launches it and whatever lies between the nodes."""
    return (
        row.local_strategy,
        row.replicas_per_node,
        row.stages,
        row.threads_per_worker,
        row.micro_batches,
        row.schedule,
        row.balance,
        row.split_points,
        row.device,
    )


def _speed(row: Row) -> float:
    return 0.0 if row.speedup is None else row.speedup.median


def _relation(
    lines: Sequence[StrategyLine], place: tuple[str, int], ratio: Ratio
) -> Relation | None:
    launcher, nodes = place
    pairs = [(line, e) for line in lines if (e := line.under(launcher, nodes)) is not None]
    if len(pairs) < 2:
        return None
    alone = {line.configuration: line.configuration for line, _ in pairs}
    there = {line.configuration: e.configuration for line, e in pairs}
    fastest_alone = max(pairs, key=lambda p: p[0].speedup.median)[0].configuration
    fastest_there = max(pairs, key=lambda p: p[1].speedup.median)[0].configuration
    return Relation(
        launcher=launcher,
        nodes=nodes,
        strategies=len(pairs),
        rank_correlation=rank_correlation(
            [line.speedup.median for line, _ in pairs], [e.speedup.median for _, e in pairs]
        ),
        fastest_alone=fastest_alone,
        tied_alone=tuple(_tied(fastest_alone, alone, ratio)),
        fastest_there=fastest_there,
        tied_there=tuple(_tied(fastest_there, there, ratio)),
    )


def _tied(fastest: str, configurations: dict[str, str], ratio: Ratio) -> Iterable[str]:
    """The strategies whose speed, there, cannot be told from the fastest's.

    configurations: of each strategy, by its name alone.
    """
    for strategy, configuration in configurations.items():
        if strategy != fastest:
            over = ratio(configurations[fastest], configuration)
            if over is None or over.contains(1):
                yield strategy
