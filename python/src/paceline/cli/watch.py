"""`paceline watch`: show a running run in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.errors import ExitCode

_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.2, 60.0


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    watch = verbs.add_parser("watch", help="show a running run in this terminal")
    watch.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    watch.add_argument("--once", action="store_true", help="print once and exit")
    watch.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="default: 1"
    )
    watch.set_defaults(command=_watch)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not _LEAST_INTERVAL_S <= seconds <= _MOST_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"expected {_LEAST_INTERVAL_S:g} to {_MOST_INTERVAL_S:g} seconds, got {text}"
        )
    return seconds


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
