"""Comparisons of whole runs as text for the terminal; it fits 80 columns."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.analysis.labels import short_name
from paceline.analysis.rows import planned_row
from paceline.report.wording import NOT_MEASURED, bounds, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from paceline.analysis.history import RunOfHistory
    from paceline.analysis.run_comparison import PairedRow, RunComparison
    from paceline.analysis.run_differences import Difference
    from paceline.plan.trial import Trial

_MOST_OF_A_KIND = 12  # differences that are listed
_COMMIT_DIGITS = 8


def runs_view(
    comparison: RunComparison, differences: Sequence[Difference], trials: Iterable[Trial]
) -> RenderableType:
    """Return what `paceline compare RUN_A RUN_B` prints.

    trials: of both runs, one of each configuration.
    """
    names = configuration_names(trials)
    parts: list[RenderableType] = [differences_view(differences)]
    parts += [Text(""), Text(_sentence(comparison), style="bold"), Text("")]
    if comparison.rows:
        parts.append(_rows_table(comparison.rows, names))
        parts.append(Text("= no significant difference (5 %, Holm)", style="dim"))
    for run, only in (("first", comparison.only_before), ("second", comparison.only_after)):
        parts += [Text(f"only in the {run} run: {names[each]}") for each in only]
    unequal = [row for row in comparison.rows if row.equivalent != (True, True)]
    parts += [Text(f"? {names[row.configuration]}: {_not_shown(row)}") for row in unequal]
    return Group(*parts)


def history_view(runs: Sequence[RunOfHistory]) -> RenderableType:
    """Return what `paceline history DIR` prints."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("time (UTC)", "run", "commit", "machine"):
        table.add_column(name, overflow="fold")
    table.add_column("samples\n/s", justify="right", no_wrap=True)
    table.add_column("fastest", overflow="fold")
    table.add_column("change", no_wrap=True)
    for run in runs:
        table.add_row(*_history_cells(run))
    return Group(table, *(Text(line) for run in runs for line in _changes(run)))


def configuration_names(trials: Iterable[Trial]) -> dict[str, str]:
    """Return the short names of configurations with their workload."""
    rows = [planned_row(trial) for trial in trials]
    return {row.configuration: f"{row.workload}: {short_name(row, rows)}" for row in rows}


def differences_view(differences: Sequence[Difference]) -> RenderableType:
    """Show what differs between two runs."""
    if not differences:
        return Text("Machine, packages, git commit and spec are equal.")
    table = Table(
        title="Differences between the runs",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for name in ("of", "what", "first run", "second run"):
        table.add_column(name, overflow="fold")
    for kind in dict.fromkeys(each.of for each in differences):
        same = [each for each in differences if each.of == kind]
        for each in same[:_MOST_OF_A_KIND]:
            table.add_row(kind, each.name, each.before or "none", each.after or "none")
        if len(same) > _MOST_OF_A_KIND:
            table.add_row(kind, f"{len(same) - _MOST_OF_A_KIND} more, see --json", "", "")
    return table


def _sentence(comparison: RunComparison) -> str:
    if not comparison.rows:
        return "The runs have no finished configuration in common."
    faster, slower = len(comparison.faster), len(comparison.slower)
    count = len(comparison.rows)
    same = count - faster - slower
    return (
        f"Of {count} {'configuration' if count == 1 else 'configurations'} in both runs, the "
        f"second run is faster in {faster}, slower in {slower}, and without significant "
        f"difference in {same}."
    )


def _rows_table(rows: Sequence[PairedRow], names: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("second/\nfirst", justify="right", no_wrap=True)
    table.add_column("interval", no_wrap=True, style="dim")
    table.add_column("first\nsamples/s", justify="right", no_wrap=True)
    table.add_column("second\nsamples/s", justify="right", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    for row in rows:
        mark = "" if row.is_different else "="
        table.add_row(
            f"{mark}{row.ratio.median:.2f}",
            bounds(row.ratio),
            number(row.before.median),
            number(row.after.median),
            names[row.configuration],
        )
    return table


def _not_shown(row: PairedRow) -> str:
    runs = [
        run for run, shown in zip(("first", "second"), row.equivalent, strict=True) if not shown
    ]
    return f"not shown to be equivalent to the baseline in the {' and '.join(runs)} run"


def _changes(run: RunOfHistory) -> list[str]:
    changed = [*run.faster, *run.slower]
    if not changed:
        return []
    heading = f"\n{run.path}, speed divided by that of {run.previous}:"
    rows = [
        f"  {row.ratio.median:.2f} ({bounds(row.ratio)}) {row.configuration}" for row in changed
    ]
    return [heading, *rows]


def _history_cells(run: RunOfHistory) -> list[RenderableType]:
    created = NOT_MEASURED
    if run.created_unix_s is not None:
        created = f"{dt.datetime.fromtimestamp(run.created_unix_s, tz=dt.UTC):%Y-%m-%d %H:%M}"
    commit = NOT_MEASURED if run.commit is None else run.commit[:_COMMIT_DIGITS]
    changes = [f"▲ {len(run.faster)} faster"] if run.faster else []
    changes += [f"▼ {len(run.slower)} slower"] if run.slower else []
    return [
        created,
        run.name,
        f"{commit}+" if run.has_local_changes else commit,
        run.machine or NOT_MEASURED,
        "\n".join(number(best.samples_per_s.median) for best in run.best) or NOT_MEASURED,
        "\n".join(best.configuration for best in run.best) or NOT_MEASURED,
        Text("\n".join(changes), style="bold"),
    ]
