"""Decide from recorded results which configurations are fastest, by how much, and why.

Rows have no values of single repeats. Where a run states no verdict, errors of two speeds are taken
as independent. Within one run they partly cancel, so `paceline compare` may separate what is not
separated here.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import groupby
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from paceline.analysis.compare.row import Row, short_name
from paceline.analysis.compare.verdict import MainPart, Verdict
from paceline.analysis.explain.evidence import PHASES_OF
from paceline.analysis.explain.explanation import EXPLAINS
from paceline.analysis.statistics.intervals import CONFIDENCE, Interval
from paceline.base.errors import DataError
from paceline.measure.records.files import read_json, typed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


# the parts of a row, which is flat in JSON
_GROUPS = [name for name, kind in get_type_hints(Row).items() if is_dataclass(kind)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The rows of one run."""

    source: str  # the file
    origin: str  # date, version and machine, where they are stated
    rows: tuple[Row, ...]
    verdicts: Mapping[str, Verdict]  # by workload, where they are stated
    link: str | None = None  # speed of the link between the nodes, where it is stated
    flags: tuple[str, ...] = ()  # doubts about the run, for example other load on the machine


def read_results(path: Path) -> Iterator[Results]:
    """Yield the results of each run in a file.

    The file is the output of `paceline compare --json`, or the result of a benchmark that contains
    such output as `comparison`, or several `runs` with `rows` and the `speed` of the link.
    Raises DataError if there are no rows.
    """
    document = read_json(path)
    origin = _origin(document)
    for part in document.get("runs") or [document.get("comparison", document)]:
        rows = [{**row, **dict.fromkeys(_GROUPS, row)} for row in part.get("rows", ())]
        run = typed({**part, "rows": rows}, _Part, path)
        if not run.rows:
            raise DataError(f"{path}: expected rows of `paceline compare --json`, found none")
        yield Results(
            source=str(path),
            origin=origin,
            rows=run.rows,
            verdicts={name: each.verdict for name, each in run.workloads.items()},
            link=run.speed,
            flags=run.flags,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    rows: tuple[Row, ...]
    workloads: Mapping[str, _Judged] = field(default_factory=dict)
    speed: str | None = None
    flags: tuple[str, ...] = ()


def _origin(facts: Mapping[str, Any]) -> str:
    """Describe a run by the facts of its manifest, or of the file of a benchmark."""
    date, created_unix_s = facts.get("date"), facts.get("created_unix_s")
    if created_unix_s is not None:
        date = dt.datetime.fromtimestamp(created_unix_s, tz=dt.UTC).date().isoformat()
    version = (facts.get("versions") or {}).get("paceline")
    machine = (facts.get("host") or {}).get("cpu_model")
    stated = [date, version and f"version {version}", machine, facts.get("note")]
    return ", ".join(str(each) for each in stated if each)


class Place(NamedTuple):
    """Number of nodes, and the speed of the link between them, where it is stated."""

    nodes: int
    link: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A ranked configuration; value: its seconds per sample, or until the target is reached."""

    name: str
    configuration: str
    nodes: int
    value: Interval
    tied: bool = False  # not separated from the first one


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
    verdict: Verdict | None  # of the run; None where it is not about the first of `ranked`
    not_ranked: tuple[Row, ...]  # measured, but not equivalent, or the target was missed

    @property
    def best(self) -> Row:
        return self.row_of(self.ranked[0])

    @property
    def cores(self) -> int:
        """The largest number of cores of any configuration."""
        return max(row.placement.cores for row in self.rows.values())

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
        if self.next is None:
            return None
        if self.verdict is not None and self.verdict.runner_up == self.next.configuration:
            return self.verdict.over_runner_up
        return _ratio_of(self.next, self.ranked[0])

    @property
    def speedup(self) -> Interval | None:
        """Speedup of the fastest configuration over the baseline of its run."""
        return self.best.speed.speedup if self.target is None else self.best.goal.target_speedup

    @property
    def more_nodes(self) -> Interval | None:
        """Speed on all nodes over that on one node, the fastest of each; None without both."""
        one = next((each for each in self.ranked if each.nodes == 1), None)
        all_of_them = next((each for each in self.ranked if each.nodes == self.place.nodes), None)
        if self.place.nodes == 1 or one is None or all_of_them is None:
            return None
        return _ratio_of(one, all_of_them)

    @property
    def cause(self) -> MainPart | None:
        """The part of a step that explains at least half of the lead; None if there is none."""
        if self.next is None:
            return None
        return _cause(self.best, self.row_of(self.next))

    def row_of(self, candidate: Candidate) -> Row:
        return self.rows[candidate.configuration]

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
            key = row.workload, row.training.global_batch
            if row.is_baseline and row.placement.cores == 1 and row.training.precision == "fp32":
                known.setdefault(key, _network(row))
    return sorted(
        known.values(),
        key=lambda each: (each.parameters or 0, each.global_batch or 0),
    )


def _decisions(results: Results, everything: Sequence[Row]) -> Iterator[Decision]:
    def kind(row: Row) -> tuple[str, str]:
        return row.workload, row.training.precision

    for (workload, precision), group in groupby(sorted(results.rows, key=kind), kind):
        rows = list(group)
        ranked = sorted(_candidates(rows, everything), key=lambda each: each.value.estimate)
        if len(ranked) < 2:
            continue
        nodes = max(row.placement.nodes for row in rows)
        verdict = results.verdicts.get(workload)
        if verdict is None or verdict.best != ranked[0].configuration:
            verdict = None
        yield Decision(
            source=results.source,
            place=Place(nodes, None if nodes == 1 else results.link),
            workload=workload,
            precision=precision,
            target=rows[0].goal.target,
            ranked=tuple(_with_ties(ranked, verdict)),
            verdict=verdict,
            rows={row.configuration: row for row in rows},
            not_ranked=tuple(r for r in rows if not r.ranked and r.speed.samples_per_s is not None),
        )


def _candidates(rows: Iterable[Row], everything: Sequence[Row]) -> Iterator[Candidate]:
    for row in rows:
        rate = None if row.speed.samples_per_s is None else row.speed.samples_per_s.inverse()
        value = rate if row.goal.target is None else row.goal.time_to_target_s
        if row.ranked and value is not None:
            yield Candidate(
                name=short_name(row, everything),
                configuration=row.configuration,
                nodes=row.placement.nodes,
                value=value,
            )


def _ratio_of(slower: Candidate, faster: Candidate) -> Interval:
    """Return the ratio of two values, whose errors are taken as independent."""
    middle = math.log(slower.value.estimate / faster.value.estimate)
    half = math.hypot(*(math.log(c.value.high / c.value.low) / 2 for c in (slower, faster)))
    low, estimate, high = (math.exp(each) for each in (middle - half, middle, middle + half))
    return Interval(estimate=estimate, low=low, high=high)


def _with_ties(ranked: Sequence[Candidate], verdict: Verdict | None) -> list[Candidate]:
    """Mark those that are not separated from the first one: the difference may be chance.

    Without the run's verdict, intervals are the longer, the more there are (Bonferroni's
    correction): in at most 5 % of the runs, one that is as fast as the first one is not marked.
    """
    best, error = ranked[0], (1 - CONFIDENCE) / 2
    usual, corrected = (NormalDist().inv_cdf(1 - error / n) for n in (1, len(ranked) - 1))

    def is_tied(other: Candidate) -> bool:
        if verdict is not None:
            return other.configuration in verdict.not_separated
        ratio = _ratio_of(other, best)
        below = math.log(ratio.estimate / ratio.low) * corrected / usual
        return math.log(ratio.estimate) < below

    found = [replace(each, tied=is_tied(each)) for each in ranked[1:]]
    return [replace(best, tied=any(each.tied for each in found)), *found]


def _cause(faster: Row, slower: Row) -> MainPart | None:
    if faster.speed.step_s is None or slower.speed.step_s is None or faster.goal.target is not None:
        return None
    parts = [
        MainPart(
            phase=part,
            faster_s=sum(faster.times.step_phases_s.get(name) or 0.0 for name in phases),
            slower_s=sum(slower.times.step_phases_s.get(name) or 0.0 for name in phases),
        )
        for part, phases in PHASES_OF.items()
    ]
    largest = max(parts, key=lambda part: part.slower_s - part.faster_s)
    whole = slower.speed.step_s.estimate - faster.speed.step_s.estimate
    explains = largest.slower_s - largest.faster_s >= EXPLAINS * whole
    return largest if whole > 0 and explains else None


def _network(row: Row) -> Network:
    forward, backward = (row.times.step_phases_s.get(name) for name in ("forward", "backward"))
    return Network(
        workload=row.workload,
        global_batch=row.training.global_batch,
        parameters=row.work.parameters,
        linear_parameters=row.work.linear_parameters,
        computation_s=None if forward is None or backward is None else forward + backward,
    )
