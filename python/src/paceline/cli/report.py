"""`paceline report`: one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.api import load
from paceline.cli.options import baseline_option, out_option, run_dir_argument


@click.command("report")
@run_dir_argument
@baseline_option
@out_option("FILE.html", "Write the report here; default: RUN_DIR/report.html.")
def command(run_dir: Path, baseline: str | None, out: Path | None) -> None:
    """Write the report of a run, one HTML file.

    RUN_DIR is the newest run in runs/ by default.
    """
    print(load(run_dir, baseline=baseline).to_html(out))
