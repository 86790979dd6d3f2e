"""`paceline history`: all runs below a directory."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.analysis.between_runs.history import read_history
from paceline.cli.console import plain_console, print_json
from paceline.cli.options import RUNS, existing_run, json_option
from paceline.errors import DataError
from paceline.report.runs import history_view


@click.command("history")
@click.argument("root", metavar="[DIR]", type=existing_run, default=RUNS)
@json_option
def command(root: Path, as_json: bool) -> None:
    """List runs by time, and mark changes of speed.

    All runs below DIR are listed; default: runs/.
    """
    runs = read_history(root)
    if not runs:
        raise DataError(
            f"{root}: expected run directories below it (with manifest.json), found none; "
            "`paceline run` makes one"
        )
    if as_json:
        print_json({"runs": runs})
    else:
        plain_console().print(history_view(runs))
