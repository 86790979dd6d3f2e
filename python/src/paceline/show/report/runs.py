"""Comparisons of whole runs as text for the terminal, which fits 80 columns, and as JUnit files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree as ET

from rich.console import RenderableType
from rich.text import Text

from paceline.analysis.between_runs.gate import Gate, Judged
from paceline.analysis.between_runs.two_runs import Difference, PairedRow, RunComparison
from paceline.analysis.compare.compute_row import planned_row
from paceline.analysis.compare.row import full_name
from paceline.plan.trials.trial import Trial
from paceline.show.report.columns import UNDECIDED_MARK
from paceline.show.report.section import Cell, Column, Section, Table, spaced, terminal_view
from paceline.show.report.wording import bounds, listed, number, percent

_MOST_OF_A_KIND = 12  # differences that are listed
_MOST_NAMED = 3  # files in a sentence
_LARGEST_SEEN = 0.9  # slowdown: what finds only larger ones finds nothing useful


def runs_view(
    comparison: RunComparison,
    differences: Sequence[Difference],
    names: Mapping[str, str],
    gate: Sequence[str] = (),
    load: str = "",
) -> RenderableType:
    """Return what `paceline compare RUN_A RUN_B` prints.

    names: short names of all configurations. gate: sentences of the judgement on the second run.
    load: words of `loaded_runs`.
    """
    blocks: list[RenderableType] = [
        *differences_view(differences),
        Text(_sentence(comparison, load), style="bold"),
    ]
    if comparison.rows:
        notes = (f"{UNDECIDED_MARK} undecided: the difference may be chance (5 %, Holm)",)
        blocks.append(
            terminal_view(Section(table=_rows_table(comparison.rows, names), notes=notes))
        )
    lines = [f"only in the first run: {names[each]}" for each in comparison.only_before]
    lines += [f"only in the second run: {names[each]}" for each in comparison.only_after]
    unequal = [row for row in comparison.rows if row.equivalent != (True, True)]
    lines += [f"? {names[row.configuration]}: {_not_shown(row)}" for row in unequal]
    if lines:
        blocks.append(Text("\n".join(lines)))
    if gate:
        blocks.append(Text("\n".join(gate), style="bold"))
    return spaced(blocks)


def configuration_names(trials: Iterable[Trial]) -> dict[str, str]:
    """Return the short names of configurations with their workload."""
    rows = [planned_row(trial) for trial in trials]
    return {row.configuration: full_name(row, rows) for row in rows}


def differences_view(differences: Sequence[Difference]) -> list[RenderableType]:
    """Show what differs between two runs, first the files of the user's code."""
    files = [each.name for each in differences if each.of == "file"]
    table = terminal_view(_differences_section(differences))
    if not files:
        return [table]
    verb = "differs" if len(files) == 1 else "differ"
    return [Text(f"{listed(files, _MOST_NAMED)} {verb}.", style="bold"), table]


def _differences_section(differences: Sequence[Difference]) -> Section:
    if not differences:
        return Section(sentences=("Machine, packages, git commit and spec are equal.",))
    columns: list[Column[tuple[str, str, str, str]]] = [
        Column("of", lambda line: line[0], "text"),
        Column("what", lambda line: line[1], "text"),
        Column("first run", lambda line: line[2], "text"),
        Column("second run", lambda line: line[3], "text"),
    ]
    lines = []
    for kind in dict.fromkeys(each.of for each in differences):
        same = [each for each in differences if each.of == kind]
        lines += [
            (kind, each.name, each.before or "none", each.after or "none")
            for each in same[:_MOST_OF_A_KIND]
        ]
        if len(same) > _MOST_OF_A_KIND:
            lines.append((kind, f"{len(same) - _MOST_OF_A_KIND} more, see --json", "", ""))
    return Section(
        title="Differences between the runs", table=Table(columns=columns, items=lines, gap=1)
    )


def _sentence(comparison: RunComparison, load: str) -> str:
    if not comparison.rows:
        return "The runs have no finished configuration in common."
    faster, slower = len(comparison.faster), len(comparison.slower)
    count = len(comparison.rows)
    same = count - faster - slower
    return (
        f"Of {count} {'configuration' if count == 1 else 'configurations'} in both runs, the "
        f"second run is faster in {faster}, slower in {slower}, and undecided in "
        f"{same}{load}."
    )


def _rows_table(rows: Sequence[PairedRow], names: Mapping[str, str]) -> Table[PairedRow]:
    columns: list[Column[PairedRow]] = [
        Column("second/\nfirst", _ratio),
        Column("interval", lambda row: Cell(bounds(row.ratio), style="soft"), "name"),
        Column("first\nsamples/s", lambda row: number(row.before.estimate)),
        Column("second\nsamples/s", lambda row: number(row.after.estimate)),
        Column("configuration", lambda row: names[row.configuration], "text"),
    ]
    return Table(columns=columns, items=rows, gap=1)


def _ratio(row: PairedRow) -> str:
    return f"{'' if row.is_different else UNDECIDED_MARK}{row.ratio.estimate:.2f}"


def _not_shown(row: PairedRow) -> str:
    runs = [
        run for run, shown in zip(("first", "second"), row.equivalent, strict=True) if not shown
    ]
    return f"not shown to be equivalent to the baseline in the {' and '.join(runs)} run"


def loaded_runs(trials: Mapping[str, tuple[int, int]]) -> str:
    """Return what a sentence about runs must add about their load; empty for idle machines.

    trials: by run, those beside other work, and all.
    """
    found = [f"{loaded} of {of} trials of {run}" for run, (loaded, of) in trials.items() if loaded]
    return f"; other work ran beside {listed(found)}" if found else ""


def gate_sentences(gate: Gate, names: Mapping[str, str], load: str = "") -> list[str]:
    """Say whether the later run passed, why not, and which slowdown the test would have found.

    names: short names of the configurations. load: words of `loaded_runs`.
    """
    failed = [each for each in gate.judged if not gate.passes(each)]
    open_ones = [each for each in gate.judged if each.judgement == "undecided"]
    count = f"{len(gate.judged)} configuration{'' if len(gate.judged) == 1 else 's'}"
    if failed == open_ones and failed:
        lines = [f"Gate undecided for {len(failed)} of {count}{load}:"]
        lines += [f"  {names[each.configuration]}: {each.reason}" for each in failed]
        lines.append("`--allow-undecided` lets them pass.")
    elif not failed:
        allowed = f"more than {percent(gate.limit)} slower than in the first run"
        lines = [f"Gate passed: of {count}, none is shown to be {allowed} (5 %, Holm){load}."]
        if open_ones:
            seen = f"a slowdown of {percent(gate.limit)} could not have been seen"
            lines.append(f"In {len(open_ones)} of them {seen}.")
    else:
        lines = [f"Gate failed for {len(failed)} of {count}{load}:"]
        lines += [f"  {names[each.configuration]}: {_why_not(each, gate.limit)}" for each in failed]
    if gate.detectable is not None and gate.detectable > _LARGEST_SEEN:
        seen = percent(_LARGEST_SEEN)
        lines.append(f"Not even a slowdown of {seen} would fail this test in 80 % of cases.")
    elif gate.detectable is not None:
        seen = percent(gate.detectable)
        lines.append(f"A slowdown of {seen} would fail this test in 80 % of cases.")
    return lines


def _why_not(judged: Judged, limit: float) -> str:
    """Say why one configuration did not pass the gate."""
    if judged.judgement == "slower" and judged.ratio is not None:
        return (
            f"slower by more than {percent(limit)}: {judged.ratio.estimate:.2f} of the speed, at "
            f"most {judged.ratio.high:.2f} (95 %)"
        )
    return f"{judged.judgement}: {judged.reason}"


def junit_text(gate: Gate, names: Mapping[str, str]) -> str:
    """Return a JUnit file with one test case for each configuration."""
    failed = sum(not gate.passes(each) for each in gate.judged)
    counts = {"tests": str(len(gate.judged)), "failures": str(failed)}
    suites = ET.Element("testsuites", counts)
    suite = ET.SubElement(suites, "testsuite", {"name": "paceline compare", **counts})
    for each in gate.judged:
        name = _printable(names[each.configuration])
        case = ET.SubElement(suite, "testcase", {"classname": each.workload, "name": name})
        if not gate.passes(each):
            text = _printable(_why_not(each, gate.limit))
            failure = {"type": each.judgement, "message": text}
            ET.SubElement(case, "failure", failure).text = text
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _printable(text: str) -> str:
    """Replace control characters, which XML does not allow."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
