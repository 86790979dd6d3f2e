"""`paceline watch`: show a running run in the terminal."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.console import plain_console
from paceline.cli.options import poll_seconds, run_dir_argument
from paceline.monitor.watch import watch
from paceline.records.layout import RunFiles


@click.command("watch")
@run_dir_argument
@click.option("--once", is_flag=True, help="Print once and exit.")
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=poll_seconds,
    default=1.0,
    show_default=True,
    help="Time between two readings.",
)
def command(run_dir: Path, once: bool, interval_s: float) -> None:  # fmt: skip
    """Show a running run in this terminal.

    RUN_DIR: default: the newest run in runs/.
    """
    try:
        watch(RunFiles(run_dir), plain_console(), once=once, interval_s=interval_s)
    except KeyboardInterrupt:
        return  # the usual way to stop watching
