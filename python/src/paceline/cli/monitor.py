"""`paceline monitor`: a run in Prometheus."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.base.host.messages import say
from paceline.cli.options import run_dir_argument
from paceline.measure.records.layout import RunFiles
from paceline.show.monitor.serve import monitor


@click.command("monitor")
@run_dir_argument
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:9090",
    help="Where Prometheus answers.",
)
@click.option(
    "--grafana-listen",
    metavar="HOST:PORT",
    default="127.0.0.1:3000",
    help="Where Grafana answers.",
)
def command(run_dir: Path, listen: str, grafana_listen: str) -> None:  # fmt: skip
    """Show a run in Prometheus.

    Grafana shows it, too, where it is installed. RUN_DIR is the newest run in runs/ by default.
    """
    files = RunFiles(run_dir.absolute())
    monitor(files, say, listen=listen, grafana_listen=grafana_listen)
