"""The comparison as a table for the terminal; it fits 80 columns."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.analysis.labels import NO_TRANSPORT, distinctions, is_single, short_name
from paceline.analysis.row import COMPUTATION
from paceline.report.compression import compression_table
from paceline.report.recommend import next_sentence
from paceline.report.staleness import staleness_table
from paceline.report.wording import (
    DASH,
    NOT_MEASURED,
    bounds,
    mark_of,
    mebibytes,
    not_ranked_reason,
    number,
    percent,
    table_sentences,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.row import Row
    from paceline.analysis.statistics import Interval

_WIDE = 120  # columns from which more figures are shown
_LAYOUT_WIDTH = 9
_WIDEST_PERCENT = 999  # a wider interval says only that nothing is known
_MARK_STYLES = {"✓": "green", "✗": "bold red", "?": "yellow", "~": "cyan"}
_LEGEND = "eq.: equivalent to the baseline. Main cost: largest part beside computation."
_HTML = '<pre style="line-height: normal; overflow-x: auto">{code}</pre>'
_SHORT_COSTS = {
    "data_wait": "data wait",
    "bubble": "bubble",
    "comm_wait": "waiting",
    "comm_transfer": "transfer",
    "other": "other",
    COMPUTATION: "compute",
}


def comparison_view(comparison: Comparison, width: int) -> RenderableType:
    """Return everything that `paceline compare` prints; the console may drop the colours."""
    parts: list[RenderableType] = []
    for workload in comparison.workloads:
        sentence = f"{workload}: {comparison.verdicts[workload].sentence}"
        parts += [
            Padding(Text(sentence, style="bold"), (0, 0, 1, 0)),
            *_next_measurement(comparison, workload),
            workload_table(comparison, workload, width),
            Text(""),
        ]
        lossy = compression_table(comparison, workload, width)
        stale = staleness_table(comparison, workload, width)
        parts += [Padding(each, (0, 0, 1, 0)) for each in (lossy, stale) if each is not None]
    return Group(*parts, *_footnotes(comparison))


def _next_measurement(comparison: Comparison, workload: str) -> list[RenderableType]:
    sentence = next_sentence(comparison, workload)
    return [] if sentence is None else [Padding(Text(sentence), (0, 0, 1, 0))]


def comparison_text(comparison: Comparison, width: int = 80) -> str:
    """Return the same as plain text without colours."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(comparison_view(comparison, width))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def comparison_html(comparison: Comparison, width: int = _WIDE) -> str:
    """Return the same as an HTML element with inline styles, for notebooks."""
    console = Console(
        file=io.StringIO(), width=width, record=True, highlight=False, force_jupyter=False
    )
    console.print(comparison_view(comparison, width))
    return console.export_html(inline_styles=True, code_format=_HTML)


def workload_table(comparison: Comparison, workload: str, width: int) -> Table:
    """Return one workload's configurations, in the order of the first figure shown."""
    wide = width >= _WIDE
    table = Table(
        title=_title(comparison, workload),
        title_justify="left",
        title_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0) if wide else (0, 1, 0, 0),
        header_style="dim",
    )
    rows = comparison.rows_of(workload)
    has_target = any(row.target is not None for row in rows)
    has_speedup = any(row.speedup is not None for row in rows)
    first = "to target\ns" if has_target else "speedup"
    if has_target or has_speedup:
        table.add_column(first, justify="right", no_wrap=True)
    table.add_column("samples\n/s", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    table.add_column("layout", max_width=None if wide else _LAYOUT_WIDTH)
    table.add_column("launcher", no_wrap=True)
    table.add_column("transport", no_wrap=True)
    table.add_column("main cost\nof a step", no_wrap=True)
    if wide:
        for name in (
            *(["speedup"] if has_target else []),
            "effi-\nciency",
            "s per\nstep",
            "first\nstep s",
            "CPU\n%",
            "peak\nMiB",
        ):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("eq.", justify="right", no_wrap=True)
    ties = _ties(comparison, workload)
    for row in rows:
        cells = _cells(row, comparison, wide=wide, is_tie=row.configuration in ties)
        shown = cells if has_target or has_speedup else cells[1:]
        table.add_row(*shown, style="" if row.ranked else "dim")
    return table


def _ties(comparison: Comparison, workload: str) -> set[str]:
    """Return the best configuration and those tied with it; empty without a tie."""
    verdict = comparison.verdicts[workload]
    if verdict.best is None or not verdict.tied:
        return set()
    return {verdict.best, *verdict.tied}


def _title(comparison: Comparison, workload: str) -> str:
    rows = comparison.rows_of(workload)
    repeats = {row.repeats for row in rows if row.repeats} or {0}
    counted = DASH.join(str(n) for n in sorted({min(repeats), max(repeats)}))
    word = "repeat" if counted == "1" else "repeats"
    batches = {row.global_batch for row in rows if row.global_batch is not None}
    batch = f", global batch {batches.pop()}" if len(batches) == 1 else ""
    return f"{workload}{batch}, {counted} {word}"


def _cells(row: Row, comparison: Comparison, *, wide: bool, is_tie: bool) -> list[RenderableType]:
    layout = [] if is_single(row) else [row.layout]
    layout += distinctions(row, comparison.rows)
    mark = mark_of(row)
    if row.target is None:
        first = _speedup(row, wide=wide, is_tie=is_tie)
    else:
        first = _time_to_target(row, is_tie=is_tie)
    found: list[RenderableType] = [
        Text("failed", style="red") if row.failed else first,
        number(row.samples_per_s),
        row.local_strategy,
        Text("\n".join(layout)),
        row.launcher,
        NOT_MEASURED if row.transport == NO_TRANSPORT else row.transport,
        _main_cost(row),
    ]
    if wide:
        found += [] if row.target is None else [_speedup(row, wide=False, is_tie=False)]
        found += [
            NOT_MEASURED if row.efficiency is None else f"{row.efficiency.median:.2f}",
            number(row.step_s),
            number(row.time_to_first_step_s),
            percent(row.cpu_percent),
            mebibytes(row.memory_peak_bytes),
        ]
    return [*found, Text(NOT_MEASURED if row.failed else mark, style=_MARK_STYLES.get(mark, ""))]


def _speedup(row: Row, *, wide: bool, is_tie: bool) -> Text:
    if row.speedup is None:
        return Text(NOT_MEASURED)
    if row.is_baseline:
        return Text("1 (base)")
    text = Text(f"{'=' if is_tie else ''}{row.speedup.median:.2f}")
    spread = f"({bounds(row.speedup)})" if wide else f"±{_half_width_percent(row.speedup)}%"
    return text.append(f" {spread}", style="dim")


def _time_to_target(row: Row, *, is_tie: bool) -> Text:
    if row.time_to_target_s is None:
        return Text("missed")
    text = Text(f"{'=' if is_tie else ''}{number(row.time_to_target_s)}")
    return text.append(f" ±{_half_width_percent(row.time_to_target_s)}%", style="dim")


def _half_width_percent(interval: Interval) -> str:
    """Return the larger distance of a bound from the median, in percent of the median."""
    if math.isinf(interval.high):
        return "∞"
    distance = max(interval.high - interval.median, interval.median - interval.low)
    share = 100 * distance / interval.median
    if share > _WIDEST_PERCENT:
        return f">{_WIDEST_PERCENT}"
    return f"{share:.0f}" if share >= 1 or share == 0 else "<1"


def _main_cost(row: Row) -> str:
    if row.main_cost is None or row.main_cost_share is None:
        return NOT_MEASURED
    return f"{_SHORT_COSTS[row.main_cost]} {100 * row.main_cost_share:.0f}%"


def _footnotes(comparison: Comparison) -> list[RenderableType]:
    lines = [Text(_LEGEND, style="dim"), *map(Text, table_sentences(comparison))]
    if any(verdict.tied for verdict in comparison.verdicts.values()):
        lines.append(Text("= tied with the fastest: no significant difference (5 %, Holm)"))
    for row in comparison.rows:
        name = f"{row.workload}: {short_name(row, comparison.rows)}"
        if row.is_unchecked_script:
            lines.append(Text(f"{mark_of(row)} {name}: {row.equivalence_reason}"))
        elif not row.ranked and not row.failed:
            reason = not_ranked_reason(row)
            lines.append(Text(f"{mark_of(row)} {name} is not ranked: {reason}"))
    if any(row.step_s is not None and row.samples_per_s is None for row in comparison.rows):
        lines.append(Text("Without known samples, speedups compare steps per second."))
    if all(row.repeats == 1 for row in comparison.rows if not row.failed):
        lines.append(Text("One repeat: ± covers the steps, not the run-to-run noise.", style="dim"))
    for trial in comparison.unfinished:
        text = Text(f"✗ {trial.trial_id}: {trial.status}", style="red")
        if trial.message:
            text.append(f": {trial.message.splitlines()[0]}")
        lines.append(text)
    lines += [Text(f"! {flag}", style="yellow") for flag in comparison.flags]
    return list(lines)
