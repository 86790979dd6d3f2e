"""`paceline list`: everything that a spec can name, with the extensions of other packages."""

from __future__ import annotations

import argparse
import tomllib
from typing import Any

from rich.table import Table

from paceline.cli.console import plain_console, print_json
from paceline.errors import ExitCode
from paceline.records.rows import SCHEMA
from paceline.spec.extensions import GROUPS
from paceline.spec.loading import shipped_experiments

_EXPERIMENTS = "experiments"
KINDS = (_EXPERIMENTS, *GROUPS)


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = verbs.add_parser("list", help="show the experiments, and what a spec can name")
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; default: all"
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=_list, fault=parser.error)


def _list(arguments: argparse.Namespace) -> int:
    for kind in arguments.kinds:
        if kind not in KINDS:
            arguments.fault(f'expected one of {", ".join(KINDS)}, got "{kind}"')
    found = {kind: _entries(kind) for kind in arguments.kinds or KINDS}
    if arguments.json:
        print_json({"schema": SCHEMA, **found})
        return ExitCode.OK
    for kind, entries in found.items():
        table = Table.grid(padding=(0, 2))
        table.add_column("name", no_wrap=True)
        table.add_column("summary", overflow="fold")
        for entry in entries:
            package = "" if entry["package"] == "paceline" else f" (package {entry['package']})"
            table.add_row(f"  {entry['name']}", entry["summary"] + package)
        print(kind)
        plain_console().print(table)
    return ExitCode.OK


def _entries(kind: str) -> list[dict[str, Any]]:
    if kind == _EXPERIMENTS:
        return [
            {"name": name, "summary": tomllib.loads(text)["description"], "package": "paceline"}
            for name, text in shipped_experiments().items()
        ]
    group = GROUPS[kind]
    return [
        {"name": each.name, "summary": each.summary, "package": group.package_of(each.name)}
        for each in group.all()
    ]
