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
from paceline.analysis.trial.load import LoadOfRun
from paceline.measure.records.documents import Stopping

_FIRST_STEPS = "✓¹"
_LARGE_RATIO = 100.0  # two decimals of such a bound tell nothing
_LEAST_DISTANCE = 1e-5  # of a bound: less is rounding
_MOST_DRAWN = 2.0  # of the estimate: a figure shows no more of a wide interval
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
NOT_KNOWN = "not known"  # an interval without bounds
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


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


def percent(value: float) -> str:
    """Format a share of 1 in percent with two significant digits, never with an exponent."""
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.2g} %"


def number_word(value: int, noun: str | None = None) -> str:
    """Return a number in words, with its noun, for example `two cores`."""
    word = _NUMBERS[value] if value < len(_NUMBERS) else str(value)
    return word if noun is None else f"{word} {noun}{'' if value == 1 else 's'}"


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
    """Format the bounds of a ratio for a table."""
    return _joined(_ratio_ends(interval), DASH)


def bounds_in_words(interval: Interval) -> str:
    """Format the bounds of a ratio for a sentence, for example `0.35 to 2.34`."""
    return _joined(_ratio_ends(interval), " to ") if interval.is_known else f"interval {NOT_KNOWN}"


def range_of(interval: Interval) -> str:
    """Format the bounds for a table, with two significant digits of their distance."""
    return _joined(_ends(interval.low, interval.high) if interval.is_known else None, DASH)


def bounds_ms(interval: Mean) -> str:
    """Format the bounds of seconds in milliseconds."""
    is_known = math.isfinite(interval.low) or math.isfinite(interval.high)
    ends = _ends(1000 * interval.low, 1000 * interval.high) if is_known else None
    return _joined(ends, " to ")


def _joined(ends: tuple[str, str] | None, between: str) -> str:
    return NOT_KNOWN if ends is None else f"{ends[0]}{between}{ends[1]}"


def _ratio_ends(interval: Interval) -> tuple[str, str] | None:
    if not interval.is_known:
        return None
    if interval.high >= _LARGE_RATIO:
        return number(interval.low), number(interval.high)
    ends = interval.low, interval.high
    # 0.998 is not 1.00, because the sign of a difference matters
    decimals = 3 if any(end != 1 and round(end, 2) == 1 for end in ends) else 2
    return f"{ends[0]:.{decimals}f}", f"{ends[1]:.{decimals}f}"


def _ends(low: float, high: float) -> tuple[str, str]:
    """Format two bounds so that their distance has two significant digits."""
    distance = high - low
    if not math.isfinite(distance) or distance <= 0 or distance < _LEAST_DISTANCE * abs(high):
        return number(low), number(high)
    decimals = max(0, 1 - math.floor(math.log10(distance)))
    # 0.0 is added because a rounded -0.0 has a sign
    low, high = (round(end, decimals) + 0.0 for end in (low, high))
    return f"{low:.{decimals}f}", f"{high:.{decimals}f}"


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


def drawn(interval: Interval) -> tuple[float, float]:
    """Return the ends of what is drawn of an interval; only the estimate without bounds."""
    if not interval.is_known:
        return interval.estimate, interval.estimate
    return interval.low, min(interval.high, _MOST_DRAWN * interval.estimate)


def with_bounds(interval: Interval | None) -> str:
    """Format the estimate with its interval in parentheses."""
    if interval is None:
        return NOT_MEASURED
    return f"{interval.estimate:.2f} ({bounds(interval)})"


def beside_load(sentence: str, load: LoadOfRun) -> str:
    """Return a sentence about measured trials with what is known of their load."""
    words = load_words(load)
    if load.is_constant:
        return f"{words[0].upper()}{words[1:]}, {sentence[0].lower()}{sentence[1:]}"
    return f"{sentence.removesuffix('.')}; {words}." if words else sentence


def load_clause(load: LoadOfRun) -> str:
    """Return what follows a statement that comes from measured trials; empty without load."""
    words = load_words(load)
    return f", measured {words}" if load.is_constant else f"; {words}" if words else ""


def load_words(load: LoadOfRun) -> str:
    """Say how many trials ran beside other work, and what it took; no words for an idle machine."""
    if not load.beside_others + load.again_beside_others:
        return ""
    again = f"{load.measured_again} {'was' if load.measured_again == 1 else 'were'} measured again"
    if load.again_beside_others:
        again += f", {load.again_beside_others} of them beside other work, too"
    who = "other machines" if load.is_mostly_stolen else "other processes"
    trials = f"{load.beside_others} of {load.trials} trials"
    if load.is_constant:
        more = f"; {again}" if load.measured_again else ""
        return f"while {who} took {_taken(load)} ({trials}{more})"
    most = max(found.percent for found in load.by_trial.values())
    took = f"{trials} ran beside other work (up to {most:.0f} % of the cores)"
    return f"{took}, {again}" if load.measured_again else took


def _taken(load: LoadOfRun) -> str:
    """Return for example `one of two cores`, or a share where that is not about whole cores."""
    if load.cores is not None:
        taken = round(load.usual_percent / 100 * load.cores)
        if 1 <= taken <= load.cores:
            return f"{number_word(taken)} of {number_word(load.cores, 'core')}"
    return f"{load.usual_percent:.0f} % of the cores"


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


def in_workload(comparison: Comparison, workload: str, words: str) -> str:
    """Return words with the name of the workload before them if the run has several."""
    return f"{workload}: {words}" if len(comparison.workloads) > 1 else words


def arithmetic_words(comparison: Comparison, found: LocalGlobal) -> str:
    """Return precision and memory format in parentheses if a workload has several, else no text."""
    same = [each for each in comparison.local_global if each.workload == found.workload]
    return f" ({found.precision}, {found.memory_format})" if len(same) > 1 else ""


def mark_of(row: Row) -> str:
    """Mark a row: ✓ equivalent, ✓¹ its first steps are, (✓) its ranks agree, ✗ not, ~ lossy on
    purpose, ? not decided."""
    if row.is_lossy_on_purpose:
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
