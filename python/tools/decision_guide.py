"""Write docs/results/decision-guide.md: what was fastest where, by how much, and why.

    cd docs/results && ../../.venv/bin/python ../../python/tools/decision_guide.py FILE.json ... \\
        > decision-guide.md

The first line of the page has the files. A file is the output of `paceline compare --json`, or the
result of a benchmark that contains it. Rows have no values of single repeats, so errors of two
speeds are taken as independent. Within one run they partly cancel, so `paceline compare` may
separate what is not separated here.
"""

from __future__ import annotations

import datetime as dt
import math
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import NormalDist
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.analysis.compare.row import Row, short_name
from paceline.analysis.compare.verdict import EXPLAINS, Cause, Verdict
from paceline.analysis.explain.parts import PART_LABELS, PHASES_OF
from paceline.analysis.recommend import Candidate
from paceline.analysis.statistics.intervals import CONFIDENCE, Interval
from paceline.analysis.trial.configuration import TIMES
from paceline.errors import DataError
from paceline.records.files import read_json, typed
from paceline.report.columns import NEAR_MARK
from paceline.report.wording import NOT_MEASURED, bounds, megabytes, milliseconds
from paceline.spec.extensions import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


TEMPLATE = Path(__file__).with_name("decision_guide_template.md")
_Key = TypeVar("_Key", bound=Hashable)
_MOST_FLAGS = 3  # of a run; `paceline compare` shows all
_SHORT_HEAD = ("where", "local strategy", "launcher", "transport", "all nodes against one node")
_NETWORK_HEAD = (
    "network", "model", "samples per step", "parameters", "in linear layers", "gradients, MB",
    "computation per MB of gradients, one core",
)  # fmt: skip
_COMPARISON_HEAD = (
    "where", "fastest", "speedup over baseline", "all nodes over one", "against the next", "data"
)  # fmt: skip


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
        run = typed(part, _Part, path)
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
        if self.next is None:
            return None
        if self.verdict is not None and self.verdict.runner_up == self.next.configuration:
            return self.verdict.over_runner_up
        return _ratio_of(self.next, self.ranked[0])

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
        return _ratio_of(one, all_of_them)

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
        verdict = results.verdicts.get(workload)
        if verdict is None or verdict.best != ranked[0].configuration:
            verdict = None
        yield Decision(
            source=results.source,
            place=Place(nodes, None if nodes == 1 else results.link),
            workload=workload,
            precision=precision,
            target=rows[0].target,
            ranked=tuple(_with_ties(ranked, verdict)),
            verdict=verdict,
            rows={row.configuration: row for row in rows},
            not_ranked=tuple(r for r in rows if not r.ranked and r.samples_per_s is not None),
        )


def _candidates(rows: Iterable[Row], everything: Sequence[Row]) -> Iterator[Candidate]:
    for row in rows:
        rate = None if row.samples_per_s is None else row.samples_per_s.inverse()
        value = rate if row.target is None else row.time_to_target_s
        if row.ranked and value is not None:
            yield Candidate(
                name=short_name(row, everything),
                configuration=row.configuration,
                nodes=row.nodes,
                value=value,
                reason="",
            )


def _ratio_of(slower: Candidate, faster: Candidate) -> Interval:
    """Return the ratio of two values, whose errors are taken as independent."""
    middle = math.log(slower.value.median / faster.value.median)
    half = math.hypot(*(math.log(c.value.high / c.value.low) / 2 for c in (slower, faster)))
    low, median, high = (math.exp(each) for each in (middle - half, middle, middle + half))
    return Interval(median=median, low=low, high=high)


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
        below = math.log(ratio.median / ratio.low) * corrected / usual
        return math.log(ratio.median) < below

    found = [replace(each, tied=is_tied(each)) for each in ranked[1:]]
    return [replace(best, tied=any(each.tied for each in found)), *found]


def _cause(faster: Row, slower: Row) -> Cause | None:
    if faster.step_s is None or slower.step_s is None or faster.target is not None:
        return None
    parts = [
        Cause(
            phase=part,
            faster_s=sum(faster.step_phases_s.get(name) or 0.0 for name in phases),
            slower_s=sum(slower.step_phases_s.get(name) or 0.0 for name in phases),
        )
        for part, phases in PHASES_OF.items()
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


def guide(
    found: Sequence[Decision], results: Sequence[Results], workloads: Mapping[str, str]
) -> str:
    """Return the page.

    found: at least one. workloads: models of the installed workloads by name; the page says which
    ones were not measured.
    """
    places = _by(found, lambda each: each.place)
    tied = [each for each in found if len(each.fastest) > 1]
    undecided = [_subject(each) for each in tied if each.next is None]
    measured = {each.workload for each in found}
    text = TEMPLATE.read_text("utf-8")
    return Template(text).substitute(
        sources_command=" ".join(dict.fromkeys(each.source for each in results)),
        in_short=_table(_SHORT_HEAD, map(_short_cells, places.values())),
        networks=_table(_NETWORK_HEAD, (_network_cells(e, workloads) for e in networks(found))),
        comparisons="\n\n".join(_comparisons(found, list(places))),
        tied=len(tied),
        compared=len(found),
        undecided=f" None is separated in: {'; '.join(undecided)}." if undecided else "",
        not_ranked=_lines(_not_ranked(found)) or "All configurations are ranked.",
        not_measured=_lines(_not_measured(places, workloads)),
        example=next((name for name in workloads if name not in measured), found[0].workload),
        sources=_lines(_sources(results)),
    )


def _comparisons(found: Sequence[Decision], places: Sequence[Place]) -> Iterator[str]:
    """Yield a section for each workload."""
    for workload, group in _by(found, lambda each: each.workload).items():
        ordered = sorted(group, key=lambda each: places.index(each.place))
        yield f"## {workload}\n\n{_table(_COMPARISON_HEAD, map(_comparison_cells, ordered))}"


def _by(found: Iterable[Decision], key: Callable[[Decision], _Key]) -> dict[_Key, list[Decision]]:
    groups: dict[_Key, list[Decision]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups


def _short_cells(found: Sequence[Decision]) -> list[str]:
    ratios = [each.more_nodes for each in found if each.more_nodes is not None]
    faster, slower = sum(r.low > 1 for r in ratios), sum(r.high < 1 for r in ratios)
    open_ = len(ratios) - faster - slower
    return [
        _place(found[0]),
        _tally(found, lambda row: row.local_strategy),
        _tally(found, lambda row: row.launcher),
        _tally(found, lambda row: row.transport),
        f"faster in {faster}, slower in {slower}, open in {open_}" if ratios else NOT_MEASURED,
    ]


def _tally(found: Iterable[Decision], choice: Callable[[Row], str]) -> str:
    won: dict[str, list[bool]] = {}
    for decision in found:
        fastest = {choice(row) for row in decision.rows_of(decision.fastest)}
        for name in {choice(row) for row in decision.rows_of(decision.ranked)}:
            won.setdefault(name, []).append(name in fastest)
    shares = {name: sum(each) / len(each) for name, each in won.items()}
    ordered = sorted(won, key=lambda name: (-shares[name], -len(won[name]), name))
    if len(ordered) == 1:
        return f"only `{ordered[0]}` was measured"
    return ", ".join(f"`{name}` {sum(won[name])} of {len(won[name])}" for name in ordered)


def _network_cells(network: Network, workloads: Mapping[str, str]) -> list[str]:
    size, linear, sent = network.parameters, network.linear_parameters, network.gradient_bytes
    per_mb = None
    if network.computation_s is not None and sent:
        per_mb = milliseconds(network.computation_s / sent * 1e6)
    return [
        f"[{network.workload}](#{network.workload})",
        workloads.get(network.workload, "own training"),
        str(network.global_batch or NOT_MEASURED),
        NOT_MEASURED if size is None else f"{size:,}",
        NOT_MEASURED if not size or linear is None else f"{100 * linear / size:.0f} %",
        megabytes(sent),
        per_mb or NOT_MEASURED,
    ]


def _comparison_cells(decision: Decision) -> list[str]:
    first, *tied = decision.fastest
    speedup = _ratio(decision.speedup)
    if decision.best.repeats == 1:
        speedup += ", one repeat: without the noise between runs"
    return [
        _where(decision),
        "<br>".join([f"**{first.name}**", *(f"{NEAR_MARK} {each.name}" for each in tied)]),
        speedup,
        _ratio(decision.more_nodes),
        _next(decision),
        f"[{len(decision.ranked)} ranked]({decision.source})",
    ]


def _place(decision: Decision) -> str:
    nodes, link = decision.place
    words = [_counted(nodes, "node"), None if link is None else f"link {link}"]
    return ", ".join(each for each in words if each)


def _where(decision: Decision) -> str:
    precision = None if decision.precision == "fp32" else decision.precision
    words = [_place(decision), _counted(decision.cores, "core"), precision, decision.target]
    return ", ".join(each for each in words if each)


def _subject(decision: Decision) -> str:
    return f"{decision.workload}, {_where(decision)}"


def _ratio(interval: Interval | None) -> str:
    if interval is None:
        return NOT_MEASURED
    return f"{interval.median:.2f}{TIMES} ({bounds(interval)})"


def _next(decision: Decision) -> str:
    """Name the next configuration, how far it is behind, and the main reason."""
    best, after = decision.best, decision.next
    if after is None:
        return "none is separated"
    words = f"{_ratio(decision.lead)} as fast as {after.name}"
    steps, more = best.steps_to_target, decision.row_of(after).steps_to_target
    if steps is not None and more is not None and steps != more:
        return f"{words}; steps: {steps:g} instead of {more:g}"
    cause = decision.cause
    if cause is None:
        return f"{words}; several parts of a step differ"
    spent = f"{milliseconds(cause.faster_s)} instead of {milliseconds(cause.slower_s)} per step"
    return f"{words}; {PART_LABELS[cause.phase]}: {spent}"


def _not_ranked(found: Iterable[Decision]) -> Iterator[str]:
    for each in found:
        for row in each.not_ranked:
            reason = row.equivalence_reason or "; ".join(row.notes) or "not equivalent"
            yield f"{_subject(each)}: `{row.configuration}`: {reason}"


def _not_measured(
    places: Mapping[Place, Sequence[Decision]], workloads: Mapping[str, str]
) -> Iterator[str]:
    for found in places.values():
        missing = [name for name in workloads if name not in {each.workload for each in found}]
        if missing:
            yield f"{_place(found[0])}: {', '.join(missing)}"
    rows = [row for found in places.values() for each in found for row in each.rows.values()]
    devices = ", ".join(sorted({row.device for row in rows}))
    most = max(place.nodes for place in places)
    yield f"devices other than {devices}; more than {_counted(most, 'node')}"


def _sources(results: Iterable[Results]) -> Iterator[str]:
    found = dict.fromkeys((each.source, each.origin, each.flags) for each in results)
    for source, origin, flags in found:
        yield ". ".join(
            [f"[{source}]({source}): {origin or 'date not stated'}", *flags[:_MOST_FLAGS]]
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _lines(items: Iterable[str]) -> str:
    return "\n".join(f"- {each}" for each in items)


def main() -> None:
    results = [each for path in sys.argv[1:] for each in read_results(Path(path))]
    found = decisions(results)
    if not found:
        raise SystemExit("decision_guide.py: expected two equivalent configurations of one run")
    models = {workload.name: workload.model for workload in WORKLOADS.all()}
    sys.stdout.write(guide(found, results, models))


if __name__ == "__main__":
    main()
