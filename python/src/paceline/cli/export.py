"""`paceline export`: write a run for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.api import load
from paceline.cli.options import out_option, run_dir_argument, trust_option
from paceline.show.export.run_data import FORMATS


@click.command("export")
@run_dir_argument
@click.option(
    "--to", type=click.Choice(FORMATS), required=True, metavar="FORMAT", help=", ".join(FORMATS)
)
@out_option("DIR", "Write the files here; default: RUN_DIR/export/FORMAT.")
@click.option("--trial", metavar="ID", help="Export only this trial.")
@trust_option
def command(run_dir: Path, to: str, out: Path | None, trial: str | None, trust_run: bool) -> None:
    """Write a run for other tools.

    RUN_DIR is the newest run in runs/ by default.
    """
    for path in load(run_dir).export(to, out, trial, trust_run=trust_run):
        print(path)
