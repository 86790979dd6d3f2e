"""The columns of the comparison, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.analysis.compare.row import COMPUTATION, NO_TRANSPORT, Row, distinctions, is_single
from paceline.analysis.compare.run import Comparison
from paceline.analysis.compare.verdict import Verdict
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.usage import HostUsage
from paceline.measure.records.phases import LABELS
from paceline.show.report.section import Bar, Cell, Column, Detail, Table
from paceline.show.report.wording import (
    DASH,
    NOT_MEASURED,
    bounds,
    drawn,
    mark_of,
    mebibytes,
    number,
    range_of,
    turns_mark,
    whole,
)

MeanAndPeak = tuple[float | None, float | None]

UNKNOWN_WIDTH = "±?"
_WIDE_PERCENT = 100.0
TIE_MARK, UNDECIDED_MARK = "=", "?"
MARK_STYLES = {
    "✓": "yes",
    "✓¹": "yes",
    "(✓)": "unknown",
    "✗": "no",
    "?": "unknown",
    "~": "lossy",
}
_SHORT_COSTS = {
    "data_wait": "data wait",
    "bubble": "bubble",
    "comm_wait": "waiting",
    "comm_transfer": "transfer",
    "other": "other",
    COMPUTATION: "compute",
}


@dataclass(frozen=True, slots=True)
class _Line:
    """A row of the comparison, and what its cells depend on."""

    row: Row
    comparison: Comparison
    detail: Detail
    near: str  # mark of what may be the fastest; empty for all that are slower
    is_best: bool
    longest: float  # upper end of the longest bar


def comparison_table(
    comparison: Comparison,
    workload: str,
    detail: Detail,
    *,
    title: str = "",
    rows: Sequence[Row] | None = None,
) -> Table[_Line]:
    """Return the configurations of a workload, in the order of the first figure shown.

    rows: only these; None takes all.
    """
    verdict = comparison.verdicts[workload]
    if rows is None:
        rows = comparison.rows_of(workload)
    figures = [each for row in rows if (each := _drawn_figure(row)) is not None]
    longest = max((drawn(each)[1] for each in figures), default=0.0)
    return Table(
        columns=_columns(rows),
        items=[
            _Line(
                row=row,
                comparison=comparison,
                detail=detail,
                near=_near_mark(verdict, row),
                is_best=row.configuration == verdict.best,
                longest=longest,
            )
            for row in rows
        ],
        title=title,
        style=_style,
        gap=1,
        bar=_bar if longest > 0 else None,
    )


def table_title(comparison: Comparison, workload: str) -> str:
    """Return workload, global batch and number of repeats."""
    rows = comparison.rows_of(workload)
    repeats = {row.repeats for row in rows if row.repeats} or {0}
    counted = DASH.join(str(n) for n in sorted({min(repeats), max(repeats)}))
    word = "repeat" if counted == "1" else "repeats"
    batches = {row.training.global_batch for row in rows if row.training.global_batch is not None}
    batch = f", global batch {batches.pop()}" if len(batches) == 1 else ""
    return f"{workload}{batch}, {counted} {word}{turns_mark(comparison.dilation)}"


def _near_mark(verdict: Verdict, row: Row) -> str:
    """Return = for a tie with the fastest, ? if that is undecided, else an empty text."""
    name = row.configuration
    if verdict.best is None or not verdict.not_separated:
        return ""
    if name == verdict.best:
        return TIE_MARK if set(verdict.ties) == set(verdict.not_separated) else UNDECIDED_MARK
    if name in verdict.ties:
        return TIE_MARK
    return UNDECIDED_MARK if name in verdict.not_separated else ""


def mark_cell(row: Row) -> Cell:
    """Return whether a row is equivalent to the baseline."""
    if not row.repeats:  # it failed, or waits for its first trial
        return Cell(NOT_MEASURED)
    return Cell(mark_of(row), style=MARK_STYLES[mark_of(row)])


def interval_cell(value: Interval | None) -> Cell:
    """Return an estimate with its interval."""
    return Cell(number(value), "" if value is None else range_of(value))


def _columns(rows: Sequence[Row]) -> list[Column[_Line]]:
    """Return the columns. Time to a target, or speedup, is first where any row has it."""
    has_target = any(row.goal.target is not None for row in rows)
    first: list[Column[_Line]] = []
    if has_target:
        first.append(Column("to target\ns", _time_to_target))
    if any(row.speed.speedup is not None for row in rows):
        first.append(Column("speedup", _speedup, detail=Detail.WIDE if has_target else Detail(0)))
    return [*first, *_COLUMNS]


def _style(line: _Line) -> str:
    if line.is_best and line.detail == Detail.PAGE:
        return "best"
    return "" if line.row.ranked else "soft"


def _failed(line: _Line) -> Cell:
    reason = line.row.failed
    return Cell("failed", style="no", tip=reason) if reason else Cell("")


def _speedup(line: _Line) -> Cell:
    row = line.row
    if row.failed and row.goal.target is None:
        return _failed(line)
    if row.speed.speedup is None:
        return Cell(NOT_MEASURED)
    if row.is_baseline:
        return Cell("1 (base)")
    is_first = row.goal.target is None
    text = f"{line.near if is_first else ''}{row.speed.speedup.estimate:.2f}"
    if line.detail == Detail.NARROW or not is_first:
        return Cell(text, half_width(row.speed.speedup))
    return Cell(text, f"({bounds(row.speed.speedup)})")


def _time_to_target(line: _Line) -> Cell:
    row = line.row
    if row.failed:
        return _failed(line)
    if row.goal.time_to_target_s is None:
        return Cell("missed" if row.repeats else NOT_MEASURED)
    text = f"{line.near}{number(row.goal.time_to_target_s)}"
    return Cell(text, half_width(row.goal.time_to_target_s))


def half_width(interval: Interval) -> str:
    """Return the larger distance of a bound from the estimate, in percent of the estimate.

    Of a wide interval, return the bounds.
    """
    if not interval.is_known:
        return UNKNOWN_WIDTH
    distance = max(interval.high - interval.estimate, interval.estimate - interval.low)
    share = 100 * distance / interval.estimate
    if share >= _WIDE_PERCENT:
        return f"({range_of(interval)})"
    return f"±{share:.0f}%" if share >= 1 or share == 0 else "±<1%"


def _samples_per_s(line: _Line) -> Cell:
    value = line.row.speed.samples_per_s
    return interval_cell(value) if line.detail == Detail.PAGE else Cell(number(value))


def _drawn_figure(row: Row) -> Interval | None:
    """Return the figure of a row that is drawn: over the baseline, larger is better."""
    return row.speed.speedup if row.goal.target is None else row.goal.target_speedup


def _bar(line: _Line) -> Bar:
    value = _drawn_figure(line.row)
    if value is None:
        return Bar(0.0, 0.0)
    low, high = drawn(value)
    return Bar(low / line.longest, high / line.longest)


def _layout(line: _Line) -> str:
    row = line.row
    layout = [] if is_single(row) else [row.setup.layout]
    separator = ", " if line.detail == Detail.PAGE else "\n"
    return separator.join([*layout, *distinctions(row, line.comparison.rows)])


def _transport(line: _Line) -> str:
    transport = line.row.setup.transport
    return NOT_MEASURED if transport == NO_TRANSPORT else transport


def _main_cost(line: _Line) -> str:
    cost, share = line.row.times.main_cost, line.row.times.main_cost_share
    if cost is None or share is None:
        return NOT_MEASURED
    name = LABELS.get(cost, cost) if line.detail == Detail.PAGE else _SHORT_COSTS[cost]
    return f"{name} {100 * share:.0f}%"


def _with_peak(figures: Callable[[HostUsage], MeanAndPeak]) -> Callable[[_Line], Cell]:
    """Return the cell of two figures of the hosts, the second on the page only."""

    def cell(line: _Line) -> Cell:
        mean, peak = figures(line.row.usage)
        return Cell(whole(mean), f"(peak {whole(peak)})" if line.detail == Detail.PAGE else "")

    return cell


def _memory(line: _Line) -> Cell:
    kind = line.row.usage.memory_peak_kind if line.detail == Detail.PAGE else None
    return Cell(mebibytes(line.row.usage.memory_peak_bytes), "" if kind is None else kind.upper())


def _efficiency(line: _Line) -> str:
    value = line.row.speed.efficiency
    return NOT_MEASURED if value is None else f"{value.estimate:.2f}"


def mark_sentences(comparison: Comparison) -> list[str]:
    """Explain the marks of configurations that may be the fastest."""
    verdicts = comparison.verdicts.values()
    found = []
    if any(verdict.ties for verdict in verdicts):
        margin = max(verdict.margin for verdict in verdicts)
        found.append(f"{TIE_MARK} tie: shown to be at most {100 * margin:g} % behind the fastest.")
    if any(set(verdict.not_separated) - set(verdict.ties) for verdict in verdicts if verdict.best):
        found.append(f"{UNDECIDED_MARK} before a figure: undecided, it may be the fastest (5 %).")
    return found


_COLUMNS: tuple[Column[_Line], ...] = (
    Column("samples\n/s", _samples_per_s),
    Column("strategy", lambda line: line.row.setup.local_strategy, "name", names_row=True),
    Column("layout", _layout, "text", names_row=True),
    Column("launcher", lambda line: line.row.setup.launcher, "name", names_row=True),
    Column("transport", _transport, "name", names_row=True),
    Column("main cost\nof a step", _main_cost, "name"),
    Column("effi-\nciency", _efficiency, detail=Detail.WIDE),
    Column("s per\nstep", lambda line: number(line.row.speed.step_s), detail=Detail.WIDE),
    Column("step\np95 s", lambda line: number(line.row.speed.step_p95_s), detail=Detail.PAGE),
    Column(
        "first\nstep s",
        lambda line: number(line.row.times.time_to_first_step_s),
        detail=Detail.WIDE,
    ),
    Column("cores", lambda line: str(line.row.placement.cores), detail=Detail.PAGE),
    Column("whole\ntrial s", lambda line: number(line.row.times.wall_s), detail=Detail.PAGE),
    Column(
        "its\nspeedup",
        lambda line: interval_cell(line.row.speed.wall_speedup),
        detail=Detail.PAGE,
    ),
    Column(
        "CPU\n%",
        _with_peak(lambda use: (use.cpu_percent, use.cpu_percent_peak)),
        detail=Detail.WIDE,
    ),
    Column("IOWait\n%", lambda line: number(line.row.usage.iowait_percent, 2), detail=Detail.PAGE),
    Column(
        "RAM\n%",
        _with_peak(lambda use: (use.ram_percent_mean, use.ram_percent_peak)),
        detail=Detail.PAGE,
    ),
    Column("peak\nMiB", _memory, detail=Detail.WIDE),
    Column(
        "threads",
        _with_peak(lambda use: (use.threads_median, use.threads_peak)),
        detail=Detail.PAGE,
    ),
    Column("final\nloss", lambda line: number(line.row.result.final_loss, 4), detail=Detail.PAGE),
    Column("re-\npeats", lambda line: str(line.row.repeats), detail=Detail.PAGE),
    Column("eq.", lambda line: mark_cell(line.row)),
)
