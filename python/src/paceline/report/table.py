"""The comparison as a table for the terminal; reads well from 80 columns on."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.report.compression import less_to_send_table
from paceline.report.labels import NAME_WIDTH, folded, short_name
from paceline.report.wording import (
    DASH,
    NOT_MEASURED,
    bounds,
    headline,
    mebibytes,
    number,
    percent,
    verdict_mark,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.row import Row

_WIDE = 104  # columns from which the speedup's interval stands beside it, not below
_NUMBERS_WIDTH = 70  # of a wide table's columns but the first
_MARK_STYLES = {"✓": "green", "✗": "bold red", "?": "yellow", "~": "cyan"}


def comparison_view(comparison: Comparison, width: int) -> RenderableType:
    """Everything that `paceline compare` prints; colours are the console's to drop."""
    parts: list[RenderableType] = []
    for workload in comparison.workloads:
        parts += [
            workload_table(comparison, workload, width),
            Padding(Text(headline(comparison, workload), style="bold"), (1, 0, 1, 0)),
        ]
        less = less_to_send_table(comparison, workload, width)
        if less is not None:
            parts.append(Padding(less, (0, 0, 1, 0)))
    return Group(*parts, *_footnotes(comparison))


def comparison_text(comparison: Comparison, width: int = 80) -> str:
    """The same without colours, as plain text."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(comparison_view(comparison, width))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def workload_table(comparison: Comparison, workload: str, width: int) -> Table:
    """One workload's configurations, fastest first."""
    wide = width >= _WIDE
    table = Table(
        title=_title(comparison, workload),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0) if wide else (0, 1, 0, 0),
        header_style="dim",
    )
    table.add_column("\nconfiguration", no_wrap=wide, min_width=None if wide else NAME_WIDTH)
    # the interval of a narrow table stands in a second line
    for name in ("speedup\n(95 %)", "effi-\nciency", "images\n/s", "s per\nstep"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("first\nstep s", "CPU\n%", "peak\nMiB", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    marks = tie_marks(comparison, workload)
    for row in comparison.rows_of(workload):
        name = short_name(row, comparison.rows)
        shown = folded(name, width - _NUMBERS_WIDTH if wide else NAME_WIDTH)
        table.add_row(*_cells(row, shown, wide, marks.get(row.configuration, "")))
    return table


def tie_marks(comparison: Comparison, workload: str) -> dict[str, str]:
    """`=` for the fastest configuration and those that it is tied with."""
    best = comparison.best.get(workload)
    if best is None or not best.tied_with:
        return {}
    return dict.fromkeys((best.configuration, *best.tied_with), "=")


def _title(comparison: Comparison, workload: str) -> str:
    row = comparison.rows_of(workload)[0]
    repeats = {r.repeats for r in comparison.rows_of(workload)}
    counted = DASH.join(str(n) for n in sorted({min(repeats), max(repeats)}))
    word = "repeat" if counted == "1" else "repeats"
    return f"{workload} · global batch {row.global_batch} · {counted} {word}"


def _cells(row: Row, name: str, wide: bool, tie: str) -> list[RenderableType]:
    mark = verdict_mark(row)
    shown = Text(name, style="" if row.ranked else "dim")
    if row.is_baseline:
        shown.append(" (baseline)" if wide else " (base)", style="dim")
    return [
        shown,
        _speedup(row, wide, tie),
        NOT_MEASURED if row.efficiency is None else f"{row.efficiency.median:.2f}",
        number(None if row.samples_per_s is None else row.samples_per_s.median),
        number(None if row.step_s is None else row.step_s.median),
        number(row.time_to_first_step_s),
        percent(row.cpu_percent),
        mebibytes(row.memory_peak_bytes),
        Text(mark, style=_MARK_STYLES[mark]),
    ]


def _speedup(row: Row, wide: bool, tie: str) -> Text:
    if row.speedup is None:
        return Text(NOT_MEASURED)
    text = Text(f"{tie}{row.speedup.median:.2f}", style="bold" if row.ranked else "dim")
    if not row.is_baseline:
        between = bounds(row.speedup)
        text.append(f" ({between})" if wide else f"\n{between}", style="dim not bold")
    return text


def _footnotes(comparison: Comparison) -> list[RenderableType]:
    lines: list[Text] = []
    if any(comparison.best[w].tied_with for w in comparison.best):
        lines.append(Text("= fastest, and tied: the 95 % interval of the ratio holds 1"))
    for row in comparison.rows:
        if not row.ranked:
            name = f"{row.workload}: {short_name(row, comparison.rows)}"
            notes = row.notes[:1] or ("no baseline to check it against",)
            lines += [Text(f"{verdict_mark(row)} {name} is not ranked: {note}") for note in notes]
    one_repeat = [row for row in comparison.rows if row.repeats == 1]
    if one_repeat:
        lines.append(
            Text("Rows of one repeat: intervals are over steps, without run-to-run noise.")
        )
    for trial in comparison.unfinished:
        text = Text(f"✗ {trial.trial_id}: {trial.status}", style="red")
        if trial.message:
            text.append(f": {trial.message.splitlines()[0]}")
        lines.append(text)
    lines += [Text(f"! {flag}", style="yellow") for flag in comparison.flags]
    return list(lines)
