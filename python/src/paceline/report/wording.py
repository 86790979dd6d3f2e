"""The words of the report: names, numbers with their intervals, and the sentence on each workload.

Used by the table and the document alike, so that both say the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.analysis.comparison import Best, Comparison, Row
    from paceline.analysis.statistics import Interval

DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
NOT_MEASURED = DASH

PHASE_WORDS = {
    "launch": "launch",
    "imports": "imports",
    "data_load": "data loading",
    "data_wait": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "comm_wait": "waiting for the slowest rank",
    "comm_transfer": "transfer of gradients",
    "optimizer": "optimiser",
    "other": "other",
    "teardown": "teardown",
}

PHASE_MEANINGS = {
    "launch": "from the launch command to the start of the rank's process",
    "imports": "interpreter start to all modules imported",
    "data_load": "opening the data set, decoding it in memory mode",
    "data_wait": "a step waiting for its batch",
    "forward": "forward pass and loss",
    "backward": "backward pass, to this rank's last gradient",
    "comm_wait": "from this rank's last gradient to the slowest rank's",
    "comm_transfer": "the rest of the exposed communication",
    "optimizer": "the optimiser's step",
    "other": "rendezvous, building the model, writing results, and what no other phase claims",
    "teardown": "from the rank's last work to the launcher's exit",
}


def short_name(row: Row) -> str:
    """`mpi · mpi · processes 2x1`: launcher, transport, local strategy, ranks x threads a rank.

    Several nodes stand before the ranks of each: `2x4x1`.
    """
    parts = [row.launcher]
    if row.transport != "none":
        parts.append(row.transport)
    strategy = row.local_strategy
    if row.cores > 1:
        nodes = f"{row.nodes}{TIMES}" if row.nodes > 1 else ""
        strategy += f" {nodes}{row.ranks_per_node}{TIMES}{row.threads_per_rank}"
    parts.append(strategy)
    return " · ".join([*parts, *_unusual(row)])


def _unusual(row: Row) -> list[str]:
    """What sets a configuration apart beyond launcher, transport, strategy and placement."""
    found = []
    if row.precision != "fp32":
        found.append(row.precision)
    if row.memory_format != "contiguous":
        found.append(row.memory_format)
    if row.bucket_mb != 25:
        found.append(f"{row.bucket_mb:g} MB buckets")
    return found


def number(value: float | None, digits: int = 3) -> str:
    """`value` to so many significant digits, without exponents where it can be read so."""
    if value is None:
        return NOT_MEASURED
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else _leading(value)
    return f"{value:.{max(0, digits - whole)}f}"


def _leading(value: float) -> int:
    """Minus the zeros after the point of a number below 1, so that digits after them count."""
    text = f"{abs(value):.6f}".split(".")[1]
    return -(len(text) - len(text.lstrip("0")))


def percent(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.0f}"


def bounds(interval: Interval) -> str:
    return f"{interval.low:.2f}{DASH}{interval.high:.2f}"


def with_bounds(interval: Interval | None) -> str:
    """The median with its interval in parentheses."""
    if interval is None:
        return NOT_MEASURED
    return f"{interval.median:.2f} ({bounds(interval)})"


def verdict_mark(row: Row) -> str:
    """Whether a row is the same training as the baseline."""
    return {True: "✓", False: "✗", None: "?"}[row.identical]


def headline(comparison: Comparison, workload: str) -> str:
    """One or two sentences: what was fastest, by how much, and why; or that it is a tie."""
    best = comparison.best.get(workload)
    if best is None:
        return (
            f"{workload}: nothing is ranked, because no configuration was shown to be the same "
            "training as the baseline."
        )
    row = comparison.row(best.configuration)
    if len([r for r in comparison.rows_of(workload) if r.ranked]) == 1:
        return f"{workload}: only {short_name(row)} was measured, so there is nothing to compare."
    return f"{workload}: " + " ".join([_fastest(comparison, best), *_behind(comparison, best)])


def _fastest(comparison: Comparison, best: Best) -> str:
    name = short_name(comparison.row(best.configuration))
    if not best.tied_with:
        return f"{name} was fastest{_times_baseline(comparison, best)}."
    names = [short_name(comparison.row(c)) for c in best.tied_with]
    return f"a tie between {name}{_times_baseline(comparison, best)} and {_listed(names)}."


def _times_baseline(comparison: Comparison, best: Best) -> str:
    baseline = comparison.baselines.get(best.workload)
    if best.speedup is None or baseline is None:
        return ""
    if best.configuration == baseline:
        return ", the baseline itself"
    return f", {best.speedup.median:.2f} times the baseline's speed ({bounds(best.speedup)})"


def _behind(comparison: Comparison, best: Best) -> list[str]:
    if best.runner_up is None or best.over_runner_up is None:
        return []
    name = short_name(comparison.row(best.runner_up))
    ratio = best.over_runner_up
    next_one = f"The next, {name}, took {ratio.median:.2f} times as long ({bounds(ratio)})"
    if best.reason is None:
        return [f"{next_one}."]
    phase, ours, theirs = best.reason.phase, best.reason.faster_s, best.reason.slower_s
    spent = f"{milliseconds(ours)} against {milliseconds(theirs)} a step"
    return [f"{next_one}, mostly for {PHASE_WORDS[phase]}: {spent}."]


def milliseconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def tied_names(comparison: Comparison, row: Row) -> list[str]:
    """Configurations that `row` is tied with, by their short names."""
    return [
        short_name(comparison.row(other))
        for tie in comparison.ties
        if row.configuration in (tie.faster, tie.slower)
        for other in (tie.faster, tie.slower)
        if other != row.configuration
    ]
