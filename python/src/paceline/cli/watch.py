"""`paceline watch`: show a running run in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.numbers import number
from paceline.errors import ExitCode

_interval_s = number(float, "0.2 to 60 seconds", lambda value: 0.2 <= value <= 60)


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    watch = verbs.add_parser("watch", help="show a running run in this terminal")
    watch.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    watch.add_argument("--once", action="store_true", help="print once and exit")
    watch.add_argument(
        "--interval", type=_interval_s, default=1.0, metavar="SECONDS", help="default: 1"
    )
    watch.set_defaults(command=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    from paceline.cli.console import plain_console
    from paceline.monitor.watch import watch
    from paceline.records.layout import RunFiles

    try:
        watch(
            RunFiles(arguments.run_dir),
            plain_console(),
            once=arguments.once,
            interval_s=arguments.interval,
        )
    except KeyboardInterrupt:
        return ExitCode.OK  # the usual way to stop watching
    return ExitCode.OK
