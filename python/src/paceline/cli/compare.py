"""`paceline compare`: the table of a run, or two runs."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import click

from paceline.analysis.between_runs.differences import run_differences
from paceline.analysis.between_runs.speeds import read_speeds
from paceline.analysis.between_runs.two_runs import compare_runs
from paceline.analysis.compare.run import no_finished_baseline
from paceline.cli.console import markdown, plain_console, print_json
from paceline.cli.options import (
    RUN_DIR,
    baseline_option,
    json_option,
    list_option,
    run_dir_argument,
)
from paceline.errors import NotComparable, UsageError
from paceline.export.run_data import RunData
from paceline.plan.selection import matching, no_match
from paceline.records.files import jsonable
from paceline.records.layout import RunFiles
from paceline.report.runs import runs_view
from paceline.report.table import comparison_view
from paceline.report.verdict import comparison_document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.compare.row import Row

_MARKDOWN_WIDTH = 200  # columns, so that all figures are shown


def _ascending(value: float | None) -> float:
    return math.inf if value is None else value


# What `--sort` can name: its key, the best row first, rows without a value last.
_SORT_KEYS: dict[str, Callable[[Row], float | str]] = {
    "samples": lambda row: math.inf if row.samples_per_s is None else -row.samples_per_s.median,
    "efficiency": lambda row: math.inf if row.efficiency is None else -row.efficiency.median,
    "step": lambda row: math.inf if row.step_s is None else row.step_s.median,
    "first-step": lambda row: _ascending(row.time_to_first_step_s),
    "cpu": lambda row: _ascending(row.cpu_percent),
    "memory": lambda row: _ascending(row.memory_peak_bytes),
    "strategy": lambda row: row.local_strategy,
    "launcher": lambda row: row.launcher,
    "transport": lambda row: row.transport,
}


@click.command("compare")
@run_dir_argument
@click.argument("second", metavar="[RUN_B]", type=RUN_DIR, required=False)
@baseline_option
@list_option(
    "--only", "PATTERN,…", "Show only the configurations whose names match these shell patterns."
)
@click.option(
    "--sort",
    metavar="COLUMN",
    type=click.Choice(list(_SORT_KEYS)),
    help=f"Sort the rows of each workload by this column: {', '.join(_SORT_KEYS)}; default: by "
    "speed.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@json_option
def command(
    run_dir: Path,
    second: Path | None,
    baseline: str | None,
    only: tuple[str, ...],
    sort: str | None,
    as_markdown: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the table of a run, or compare two runs.

    RUN_DIR: default: the newest run in runs/. RUN_B is a later run: the output says what differs,
    and which configurations became faster.
    """
    if second is not None:
        if baseline is not None or only or sort:
            raise UsageError(
                "--baseline, --only, --sort: expected one run, got two; leave them out to compare "
                "two runs"
            )
        first_files, second_files = (RunData(RunFiles(path)).files for path in (run_dir, second))
        _compare_two(first_files, second_files, as_json=as_json, as_markdown=as_markdown)
        return
    run = RunData(RunFiles(run_dir), baseline)
    shown = _sorted(_selected(run.comparison, only), sort)
    if as_json:
        print_json({**comparison_document(run.comparison), "rows": jsonable(shown.rows)})
    elif as_markdown:
        print(markdown(comparison_view(shown, _MARKDOWN_WIDTH, run.comparison)))
    else:
        print_table(shown, run.comparison)
    if not run.comparison.baselines:
        raise no_finished_baseline(run.files)


def print_table(comparison: Comparison, whole: Comparison | None = None) -> None:
    """Print verdict and table of each workload.

    whole: the comparison with all rows, if only some are shown.
    """
    console = plain_console()
    console.print(comparison_view(comparison, console.width, whole))


def _selected(comparison: Comparison, patterns: Sequence[str]) -> Comparison:
    """Keep the rows that match a pattern. Raises UsageError if a pattern matches none."""
    if not patterns:
        return comparison
    names = [row.configuration for row in comparison.rows]
    found = {pattern: matching(names, pattern) for pattern in patterns}
    if unmatched := [pattern for pattern in patterns if not found[pattern]]:
        raise no_match("--only", unmatched, names)
    wanted = {name for matched in found.values() for name in matched}
    rows = tuple(row for row in comparison.rows if row.configuration in wanted)
    return dataclasses.replace(comparison, rows=rows)


def _sorted(comparison: Comparison, column: str | None) -> Comparison:
    """Sort the rows of each workload."""
    if column is None:
        return comparison
    rows: list[Row] = []
    for workload in comparison.workloads:
        rows += sorted(comparison.rows_of(workload), key=_SORT_KEYS[column])
    return dataclasses.replace(comparison, rows=tuple(rows))


def _compare_two(first: RunFiles, second: RunFiles, *, as_json: bool, as_markdown: bool) -> None:
    """Print the comparison of two runs. Raises NotComparable if they share no configuration."""
    before, after = read_speeds(first), read_speeds(second)
    comparison = compare_runs(before, after)
    differences = run_differences(before.manifest, after.manifest)
    if as_json:
        document = {
            **comparison.to_json(),
            "first": str(first.root),
            "second": str(second.root),
            "differences": jsonable(differences),
        }
        print_json(document)
    else:
        trials = (before.trials | after.trials).values()
        view: RenderableType = runs_view(comparison, differences, trials)
        if as_markdown:
            print(markdown(view))
        else:
            plain_console().print(view)
    if not comparison.rows:
        raise NotComparable(
            f"{first.root}, {second.root}: expected a configuration that finished in both runs, "
            "found none; compare runs of the same spec"
        )
