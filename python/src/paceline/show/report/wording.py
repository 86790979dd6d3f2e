"""Numbers, marks and sentences that several parts of the output share."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from itertools import combinations

from paceline.analysis.compare.local_global import LocalGlobal
from paceline.analysis.compare.places import Place
from paceline.analysis.compare.row import NO_TRANSPORT, Row, full_name, short_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.compare.verdict import differ_in_both
from paceline.analysis.equivalence.ranks import Statement
from paceline.analysis.statistics.intervals import Interval, Mean
from paceline.measure.records.documents import Stopping

_FIRST_STEPS = "✓¹"
STATEMENT_MARKS = {
    Statement.EQUAL: "✓",
    Statement.DATA_PARALLEL: "✓",
    Statement.MEAN: "(✓)",
    Statement.NOT_SHOWN: "?",
    Statement.WRONG: "✗",
}
DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
NOT_MEASURED = DASH
NO_STEP = "no step after the warm-up was measured"
NOT_KNOWN = "not known"  # an interval that spans more than a factor of two


def number(value: float | Interval | None, digits: int = 3) -> str:
    """Format with this number of significant digits, without an exponent if possible.

    Of an interval, format the estimate.
    """
    if isinstance(value, Interval):
        value = value.estimate
    if value is None or math.isnan(value):
        return NOT_MEASURED
    if value == 0:
        return "0"
    if math.isinf(value):
        return "∞"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    whole = math.floor(math.log10(abs(value))) + 1
    return f"{value:.{max(0, digits - whole)}f}"


def whole(value: float | None) -> str:
    """Format without decimals."""
    return NOT_MEASURED if value is None else f"{value:.0f}"


def share(value: float | None, decimals: int = 0) -> str:
    """Format a share of 1 in percent."""
    return NOT_MEASURED if value is None else f"{100 * value:.{decimals}f} %"


def signed(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{MINUS if value < 0 else '+'}{number(abs(value), 2)}"


def milliseconds(seconds: float) -> str:
    """Format seconds with their unit, for a sentence."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int | None = None) -> str:
    """Return the names in words; most: more than so many are counted."""
    if most is not None and len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def bounds(interval: Interval) -> str:
    """Format the bounds of a ratio; too wide ones tell nothing."""
    if not interval.is_known:
        return NOT_KNOWN
    return f"{interval.low:.2f}{DASH}{interval.high:.2f}"


def range_of(interval: Interval) -> str:
    """Format the bounds with three significant digits; too wide ones tell nothing."""
    if not interval.is_known:
        return NOT_KNOWN
    return f"{number(interval.low)}{DASH}{number(interval.high)}"


def bounds_ms(interval: Mean) -> str:
    """Format the bounds of seconds in milliseconds."""
    return f"{in_milliseconds(interval.low)} to {in_milliseconds(interval.high)}"


def megabytes(value: float | None) -> str:
    """Format bytes in MB."""
    return number(None if value is None else value / 1e6)


def in_milliseconds(seconds: float | None) -> str:
    """Format seconds in ms."""
    return number(None if seconds is None else 1000 * seconds)


def mebibytes(value: float | None) -> str:
    """Format bytes in MiB."""
    return whole(None if value is None else value / 2**20)


def utc(unix_s: float) -> str:
    """Format a moment to the minute."""
    return f"{dt.datetime.fromtimestamp(unix_s, tz=dt.UTC):%Y-%m-%d %H:%M}"


def turns_mark(dilation: int) -> str:
    """Return what is added to a title where hosts took turns on the same cores; else nothing."""
    return "" if dilation == 1 else f", hosts in turns (dilation {dilation})"


def reach(interval: Interval) -> float:
    """Return the upper end of what is drawn of an interval."""
    return interval.high if interval.is_known else interval.estimate


def with_bounds(interval: Interval | None) -> str:
    """Format the estimate with its interval in parentheses."""
    if interval is None:
        return NOT_MEASURED
    return f"{interval.estimate:.2f} ({bounds(interval)})"


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Return ids of configurations or trials without the parts that all of them share, for a
    table."""
    if len(set(ids)) < 2:
        return {each: each for each in ids}
    parts = [each.split(".") for each in ids]
    while min(map(len, parts)) > 1 and len({own[-1] for own in parts}) == 1:
        parts = [own[:-1] for own in parts]
    fewest = min(map(len, parts))
    shared = {n for n in range(fewest) if len({own[n] for own in parts}) == 1}
    if len(shared) == fewest:
        shared.remove(fewest - 1)  # a part of each id remains
    short = (".".join(part for n, part in enumerate(own) if n not in shared) for own in parts)
    return dict(zip(ids, short, strict=True))


def not_ranked_reason(row: Row) -> str:
    """Explain why a configuration that finished has no place in the ranking."""
    if row.equivalence.other_rows is not None:
        return row.equivalence.other_rows
    if row.goal.target is not None and row.goal.time_to_target_s is None:
        missed = row.repeats - (row.goal.target_reached or 0)
        return f"{missed} of {row.repeats} repeats did not reach {row.goal.target}"
    return row.equivalence.equivalence_reason or NO_STEP


def place_words(place: Place) -> str:
    """Return for example `2 nodes (mpi over gloo)`."""
    over = "" if place.transport == NO_TRANSPORT else f" over {place.transport}"
    options = "".join(f", {option}" for option in place.options)
    return f"{counted(place.nodes, 'node')} ({place.launcher}{over}{options})"


def arithmetic_words(comparison: Comparison, found: LocalGlobal) -> str:
    """Return precision and memory format in parentheses if a workload has several, else no text."""
    same = [each for each in comparison.local_global if each.workload == found.workload]
    return f" ({found.precision}, {found.memory_format})" if len(same) > 1 else ""


def mark_of(row: Row) -> str:
    """Mark a row: ✓ equivalent, ✓¹ its first steps are, (✓) its ranks agree, ✗ not, ~ lossy on
    purpose, ? not decided."""
    if row.equivalence.is_lossy and row.equivalence.equivalent is None:
        return "~"
    if row.equivalence.equivalent is True and row.equivalence.equivalence_grade == "start":
        return _FIRST_STEPS
    if row.equivalence.statement == Statement.MEAN and row.equivalence.equivalent is None:
        return STATEMENT_MARKS[Statement.MEAN]
    return {True: "✓", False: "✗", None: "?"}[row.equivalence.equivalent]


def statement_sentences(comparison: Comparison) -> list[str]:
    """Name the scripts that differ from one process and are right data-parallel trainings."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in comparison.rows:
        if row.equivalence.statement == Statement.DATA_PARALLEL and row.equivalence.shown:
            words = row.equivalence.shown.partition("; ")[0]
            names.setdefault((mark_of(row), words), []).append(full_name(row, comparison.rows))
    return [f"{mark} {listed(own)}: {words}." for (mark, words), own in names.items()]


def table_sentences(comparison: Comparison) -> list[str]:
    """Return what a reader of the table must know: another baseline, what ✓ covers, evaluations
    that differ, and the end of the repeats."""
    found = [
        *_target_sentences(comparison),
        *_baseline_sentences(comparison),
        *_launcher_sentences(comparison),
    ]
    rows = comparison.rows
    if any(row.equivalence.equivalence_grade == "start" for row in rows):
        found.append(f"{_FIRST_STEPS}: shown for the first steps only; ✓: for the whole training.")
    found += [
        f"{full_name(row, rows)}: {'; '.join(row.equivalence.unexplained_evaluations)}."
        for row in rows
        if row.equivalence.unexplained_evaluations
    ]
    return found if comparison.stopping is None else [*found, _repeats(comparison.stopping)]


def _target_sentences(comparison: Comparison) -> list[str]:
    """Say what the time to the target covers, and which repeats missed the target."""
    rows = [row for row in comparison.rows if row.goal.target is not None]
    if not rows:
        return []
    meaning = (
        "Time to target: the duration of all training steps until an evaluation meets the target, "
        "without the evaluations."
    )
    found = [meaning]
    for row in rows:
        missed = row.repeats - (row.goal.target_reached or 0)
        if missed and row.goal.time_to_target_s is not None:
            found.append(
                f"{full_name(row, comparison.rows)}: {missed} of {row.repeats} repeats missed the "
                "target and count as slower than the others."
            )
    return found


def _baseline_sentences(comparison: Comparison) -> list[str]:
    """Name each baseline that the user has chosen in place of the sequential one."""
    return [
        f"{workload}: speedups are over {short_name(comparison.row(baseline), comparison.rows)}; "
        "equivalence is relative to the sequential baseline."
        for workload, baseline in comparison.baselines.items()
        if baseline != comparison.sequential.get(workload)
    ]


def _launcher_sentences(comparison: Comparison) -> list[str]:
    """Say which launchers are not compared alone, because no pair has the same transport."""
    found: dict[str, None] = {}
    for workload in comparison.workloads:
        rows = [row for row in comparison.rows_of(workload) if row.placement.nodes > 1]
        pairs = [(a, b) for a, b in combinations(rows, 2) if a.setup.launcher != b.setup.launcher]
        alone = {
            frozenset((a.setup.launcher, b.setup.launcher))
            for a, b in pairs
            if a.setup.transport == b.setup.transport
        }
        for first, second in pairs:
            names = sorted((first.setup.launcher, second.setup.launcher))
            if differ_in_both(first, second) and frozenset(names) not in alone:
                found[
                    f"{workload}: {listed(names)} differ in their transport, too, so their rows on "
                    "several nodes do not compare launchers alone."
                ] = None
    return list(found)


def _repeats(stopping: Stopping) -> str:
    """Say after how many repeats a run with `repeats = "auto"` ended, and why."""
    repeats = stopping.looks[-1].repeats if stopping.looks else 1
    margin = f"{100 * stopping.tie_margin:g} %"
    why = {
        "decided": f"every configuration is slower than the fastest or within {margin} of it",
        "max_repeats": "the ranking is not decided, but max_repeats is reached",
        "time": "the ranking is not decided, but limits.run_s is reached",
        None: "the run has not ended",
    }[stopping.stopped]
    return f"repeats = auto, {repeats} of at most {stopping.max_repeats}: {why}."
