"""`paceline monitor`: a run in Prometheus, and in Grafana where it is installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.errors import ExitCode


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    monitor = verbs.add_parser("monitor", help="show a run in Prometheus, and in Grafana")
    monitor.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    monitor.add_argument(
        "--listen",
        default="127.0.0.1:9090",
        metavar="HOST:PORT",
        help="where Prometheus answers (default: 127.0.0.1:9090)",
    )
    monitor.add_argument(
        "--grafana-listen",
        default="127.0.0.1:3000",
        metavar="HOST:PORT",
        help="where Grafana answers (default: 127.0.0.1:3000)",
    )
    monitor.set_defaults(command=_monitor)


def _monitor(arguments: argparse.Namespace) -> int:
    from paceline.monitor.serve import monitor
    from paceline.records.layout import RunFiles

    monitor(
        RunFiles(arguments.run_dir.absolute()),
        _say,
        listen=arguments.listen,
        grafana_listen=arguments.grafana_listen,
    )
    return ExitCode.OK


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
