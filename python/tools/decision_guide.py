"""Write docs/results/decision-guide.md: what was fastest where, by how much, and why.

    cd docs/results && ../../.venv/bin/python ../../python/tools/decision_guide.py FILE.json ... \\
        > decision-guide.md

The first line of the page has the files. A file is the output of `paceline compare --json`, or the
result of a benchmark that contains it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, TypeVar

from decisions import Decision, Network, Place, Results, decisions, networks, read_results

from paceline.analysis.explain.evidence import PART_LABELS
from paceline.analysis.trial.reading import TIMES
from paceline.plan.spec.extensions import WORKLOADS
from paceline.show.report.columns import UNDECIDED_MARK
from paceline.show.report.wording import NOT_MEASURED, bounds, megabytes, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from paceline.analysis.compare.row import Row
    from paceline.analysis.statistics.intervals import Interval


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
        _tally(found, lambda row: row.setup.local_strategy),
        _tally(found, lambda row: row.setup.launcher),
        _tally(found, lambda row: row.setup.transport),
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
        "<br>".join([f"**{first.name}**", *(f"{UNDECIDED_MARK} {each.name}" for each in tied)]),
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
    return f"{interval.estimate:.2f}{TIMES} ({bounds(interval)})"


def _next(decision: Decision) -> str:
    """Name the next configuration, how far it is behind, and the main reason."""
    best, after = decision.best, decision.next
    if after is None:
        return "none is separated"
    words = f"{_ratio(decision.lead)} as fast as {after.name}"
    steps, more = best.goal.steps_to_target, decision.row_of(after).goal.steps_to_target
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
            reason = row.equivalence.equivalence_reason or "; ".join(row.notes) or "not equivalent"
            yield f"{_subject(each)}: `{row.configuration}`: {reason}"


def _not_measured(
    places: Mapping[Place, Sequence[Decision]], workloads: Mapping[str, str]
) -> Iterator[str]:
    for found in places.values():
        missing = [name for name in workloads if name not in {each.workload for each in found}]
        if missing:
            yield f"{_place(found[0])}: {', '.join(missing)}"
    rows = [row for found in places.values() for each in found for row in each.rows.values()]
    devices = ", ".join(sorted({row.placement.device for row in rows}))
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
