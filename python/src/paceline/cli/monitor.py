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
        help="where Prometheus answers (default: 127.0.0.1:9090; port 0: any free one)",
    )
    monitor.add_argument(
        "--grafana-listen",
        default="127.0.0.1:3000",
        metavar="HOST:PORT",
        help="where Grafana answers (default: 127.0.0.1:3000)",
    )
    monitor.add_argument("--no-grafana", action="store_true", help="do not start Grafana")
    monitor.add_argument(
        "--no-backfill", action="store_true", help="do not import trials that were recorded"
    )
    scraped = monitor.add_argument_group("sidecars with TLS or authentication")
    scraped.add_argument("--bearer-token-file", type=Path, metavar="FILE")
    scraped.add_argument(
        "--basic-auth-file", type=Path, metavar="FILE", help="a line USER:PASSWORD"
    )
    scraped.add_argument("--ca-file", type=Path, metavar="FILE", help="PEM; default: the system's")
    monitor.set_defaults(command=_monitor)


def _monitor(arguments: argparse.Namespace) -> int:
    from paceline.monitor.prometheus import Access, parse_address
    from paceline.monitor.session import MonitorSettings, monitor
    from paceline.records.layout import RunFiles

    settings = MonitorSettings(
        listen=parse_address(arguments.listen),
        grafana_listen=None if arguments.no_grafana else parse_address(arguments.grafana_listen),
        backfill=not arguments.no_backfill,
        access=Access(
            bearer_token_file=arguments.bearer_token_file,
            basic_auth_file=arguments.basic_auth_file,
            ca_file=arguments.ca_file,
        ),
    )
    monitor(RunFiles(arguments.run_dir.absolute()), settings, _say)
    return ExitCode.OK


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
