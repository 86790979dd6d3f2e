"""The words of the report: phases, numbers with their intervals, and the sentence on each workload.

Used by the table and the document alike, so that both say the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.labels import short_name

if TYPE_CHECKING:
    from paceline.analysis.comparison import Best, Comparison
    from paceline.analysis.row import Row
    from paceline.analysis.statistics import Interval

DASH = "\N{EN DASH}"
NOT_MEASURED = DASH

PHASE_WORDS = {
    "launch": "launch",
    "imports": "imports",
    "data_load": "data loading",
    "data_wait": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "bubble": "waiting for neighbouring stages",
    "comm_wait": "waiting for the slowest rank",
    "comm_transfer": "averaging of gradients",
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
    "bubble": "a stage of a pipeline waiting for its neighbours between its passes",
    "comm_wait": "from this rank's last gradient to the slowest rank's",
    "comm_transfer": "the rest of the exposed communication: transfer, and the sums that it is for",
    "optimizer": "the optimiser's step",
    "other": "rendezvous, building the model, writing results, and what no other phase claims",
    "teardown": "from the rank's last work to the launcher's exit",
}


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


def mebibytes(value: float | None) -> str:
    """Bytes in MiB; GiB would need digits after the point that MiB says without."""
    return NOT_MEASURED if value is None else f"{value / 2**20:.0f}"


def bounds(interval: Interval) -> str:
    return f"{interval.low:.2f}{DASH}{interval.high:.2f}"


def with_bounds(interval: Interval | None) -> str:
    """The median with its interval in parentheses."""
    if interval is None:
        return NOT_MEASURED
    return f"{interval.median:.2f} ({bounds(interval)})"


def place_name(launcher: str, nodes: int) -> str:
    """`mpi`, or `mpi on 2 nodes`."""
    return launcher if nodes == 1 else f"{launcher} on {nodes} nodes"


def verdict_mark(row: Row) -> str:
    """Whether a row is the same training as the baseline; ~ where it is not meant to be."""
    if row.does_not_apply is not None and row.equivalent is None:
        return "~"
    return {True: "✓", False: "✗", None: "?"}[row.equivalent]


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
        name = short_name(row, comparison.rows)
        return f"{workload}: only {name} was measured, so there is nothing to compare."
    return f"{workload}: " + " ".join([_fastest(comparison, best), *_behind(comparison, best)])


def _fastest(comparison: Comparison, best: Best) -> str:
    name = short_name(comparison.row(best.configuration), comparison.rows)
    if not best.tied_with:
        return f"{name} was fastest{_times_baseline(comparison, best)}."
    names = [short_name(comparison.row(c), comparison.rows) for c in best.tied_with]
    return f"a tie between {name}{_times_baseline(comparison, best)} and {listed(names)}."


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
    name = short_name(comparison.row(best.runner_up), comparison.rows)
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


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
