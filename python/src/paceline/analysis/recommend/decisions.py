"""Decisions of several runs side by side: what was fastest where, by how much, and why.

Rows have no values of single repeats, so errors of two speeds are taken as independent. Within one
run they partly cancel, so `paceline compare` may decide what is a tie here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from paceline.analysis.explain.parts import PARTS
from paceline.analysis.labels import short_name
from paceline.analysis.noise import CONFIDENCE
from paceline.analysis.recommend.candidates import Candidate, ratio, value_of, with_ties
from paceline.analysis.verdict import EXPLAINS, Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline.analysis.recommend.results import Results
    from paceline.analysis.row import Row
    from paceline.analysis.statistics import Interval


class Place(NamedTuple):
    """Number of nodes, and the speed of the link between them, where it is stated."""

    nodes: int
    link: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The configurations of one workload and precision in one run."""

    source: str
    place: Place  # the largest number of nodes of any configuration
    workload: str
    precision: str
    target: str | None  # a quality; then its time is compared instead of the speed
    ranked: tuple[Candidate, ...]  # fastest first, at least two
    rows: Mapping[str, Row]  # by configuration
    not_ranked: tuple[Row, ...]  # measured, but not equivalent, or the target was missed

    @property
    def best(self) -> Row:
        return self.row_of(self.ranked[0])

    @property
    def cores(self) -> int:
        """The largest number of cores of any configuration."""
        return max(row.cores for row in self.rows.values())

    @property
    def fastest(self) -> list[Candidate]:
        """The first one and those without a significant difference from it."""
        return [self.ranked[0], *(each for each in self.ranked[1:] if each.tied)]

    @property
    def next(self) -> Candidate | None:
        """The fastest configuration that is significantly slower."""
        return next((each for each in self.ranked[1:] if not each.tied), None)

    @property
    def lead(self) -> Interval | None:
        """Speed of the fastest configuration over the next one."""
        return None if self.next is None else ratio(self.next, self.ranked[0])

    @property
    def speedup(self) -> Interval | None:
        """Speedup of the fastest configuration over the baseline of its run."""
        return self.best.speedup if self.target is None else self.best.target_speedup

    @property
    def more_nodes(self) -> Interval | None:
        """Speed on all nodes over that on one node, the fastest of each; None without both."""
        one = next((each for each in self.ranked if each.nodes == 1), None)
        all_of_them = next((each for each in self.ranked if each.nodes == self.place.nodes), None)
        if self.place.nodes == 1 or one is None or all_of_them is None:
            return None
        return ratio(one, all_of_them)

    @property
    def cause(self) -> Cause | None:
        """The part of a step that explains at least half of the lead; None if there is none."""
        if self.next is None:
            return None
        return _cause(self.best, self.row_of(self.next))

    def row_of(self, candidate: Candidate) -> Row:
        return self.rows[candidate.configuration or ""]

    def rows_of(self, candidates: Iterable[Candidate]) -> list[Row]:
        return [self.row_of(each) for each in candidates]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Size and computation of a workload with one batch size."""

    workload: str
    global_batch: int | None
    parameters: int | None
    linear_parameters: int | None
    computation_s: float | None  # forward and backward pass of a batch on one core, fp32

    @property
    def gradient_bytes(self) -> int | None:
        return None if self.parameters is None else 4 * self.parameters


def decisions(results: Sequence[Results]) -> list[Decision]:
    """Return the decisions by place, then in the order of the results."""
    everything = [row for each in results for row in each.rows]
    found = (decision for each in results for decision in _decisions(each, everything))
    return sorted(found, key=lambda each: each.place.nodes)


def networks(found: Iterable[Decision]) -> list[Network]:
    """Describe each workload and batch size, from the first baseline on one core."""
    known: dict[tuple[str, int | None], Network] = {}
    for decision in found:
        for row in decision.rows.values():
            key = row.workload, row.global_batch
            if row.is_baseline and row.cores == 1 and row.precision == "fp32":
                known.setdefault(key, _network(row))
    return sorted(known.values(), key=lambda each: (each.parameters or 0, each.global_batch or 0))


def _decisions(results: Results, everything: Sequence[Row]) -> Iterator[Decision]:
    def kind(row: Row) -> tuple[str, str]:
        return row.workload, row.precision

    for (workload, precision), group in groupby(sorted(results.rows, key=kind), kind):
        rows = list(group)
        ranked = sorted(_candidates(rows, everything), key=lambda each: each.value.median)
        if len(ranked) < 2:
            continue
        nodes = max(row.nodes for row in rows)
        yield Decision(
            source=results.source,
            place=Place(nodes, None if nodes == 1 else results.link),
            workload=workload,
            precision=precision,
            target=rows[0].target,
            ranked=tuple(with_ties(ranked)),
            rows={row.configuration: row for row in rows},
            not_ranked=tuple(r for r in rows if not r.ranked and r.samples_per_s is not None),
        )


def _candidates(rows: Iterable[Row], everything: Sequence[Row]) -> Iterator[Candidate]:
    for row in rows:
        value = value_of(row, "time") if row.target is None else row.time_to_target_s
        if row.ranked and value is not None:
            yield Candidate(
                name=short_name(row, everything),
                configuration=row.configuration,
                nodes=row.nodes,
                value=value,
                confidence=CONFIDENCE,
                reason="",
            )


def _cause(faster: Row, slower: Row) -> Cause | None:
    if faster.step_s is None or slower.step_s is None or faster.target is not None:
        return None
    parts = [
        Cause(
            phase=part.name,
            faster_s=sum(faster.step_phases_s.get(name) or 0.0 for name in part.phases),
            slower_s=sum(slower.step_phases_s.get(name) or 0.0 for name in part.phases),
        )
        for part in PARTS
    ]
    largest = max(parts, key=lambda part: part.slower_s - part.faster_s)
    whole = slower.step_s.median - faster.step_s.median
    explains = largest.slower_s - largest.faster_s >= EXPLAINS * whole
    return largest if whole > 0 and explains else None


def _network(row: Row) -> Network:
    forward, backward = (row.step_phases_s.get(name) for name in ("forward", "backward"))
    return Network(
        workload=row.workload,
        global_batch=row.global_batch,
        parameters=row.parameters,
        linear_parameters=row.linear_parameters,
        computation_s=None if forward is None or backward is None else forward + backward,
    )
