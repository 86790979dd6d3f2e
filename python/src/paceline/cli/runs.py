"""`paceline compare RUN_A RUN_B` and `paceline history`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.analysis.history import history_json, read_history
from paceline.analysis.run_comparison import compare_runs
from paceline.analysis.run_differences import run_differences
from paceline.analysis.speeds import read_speeds
from paceline.cli.console import plain_console, print_json
from paceline.errors import DataError, NotComparable
from paceline.records.files import jsonable
from paceline.report.runs import history_view, runs_view

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.records.layout import RunFiles


def show_runs(first: RunFiles, second: RunFiles, *, as_json: bool) -> None:
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
        plain_console().print(runs_view(comparison, differences, trials))
    if not comparison.rows:
        raise NotComparable(
            f"{first.root}, {second.root}: expected a configuration that finished in both runs, "
            "found none; compare runs of the same spec"
        )


def show_history(root: Path, *, as_json: bool) -> None:
    """Print the runs below a directory. Raises DataError if there are none."""
    runs = read_history(root)
    if not runs:
        raise DataError(
            f"{root}: expected run directories below it (with manifest.json), found none; "
            "`paceline run` makes one"
        )
    if as_json:
        print_json(history_json(runs))
    else:
        plain_console().print(history_view(runs))
