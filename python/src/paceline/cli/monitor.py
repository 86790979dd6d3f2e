"""`paceline monitor`: a run in Prometheus."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from paceline.cli.options import run_dir_argument
from paceline.monitor.prometheus import parse_address
from paceline.monitor.session import MonitorSettings, monitor
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from pathlib import Path


@click.command("monitor")
@run_dir_argument
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:9090",
    show_default=True,
    help="Where Prometheus answers; port 0 takes any free one.",
)
def command(run_dir: Path, listen: str) -> None:  # fmt: skip
    """Show a run in Prometheus.

    RUN_DIR: default: the newest run in runs/.
    """
    settings = MonitorSettings(listen=parse_address(listen), grafana_listen=None)
    monitor(RunFiles(run_dir.absolute()), settings, _say)


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
