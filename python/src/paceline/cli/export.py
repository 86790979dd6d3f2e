"""`paceline export`: write a run for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.errors import ExitCode
from paceline.export.formats import FORMATS


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = verbs.add_parser("export", help="write a run for other tools")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--to", choices=FORMATS, required=True, metavar="FORMAT", help=", ".join(FORMATS)
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="default: RUN_DIR/export/FORMAT"
    )
    parser.add_argument("--trial", metavar="ID", help="export only this trial")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> int:
    from paceline.api import load

    run = load(arguments.run_dir)
    for path in run.export(arguments.to, arguments.output, arguments.trial):
        print(path)
    return ExitCode.OK
