"""`paceline list`: everything that a spec can name, with the extensions of other packages."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

import click
from rich.table import Table

from paceline.cli.console import plain_console, print_json
from paceline.cli.options import json_option
from paceline.plan.spec.extensions import GROUPS
from paceline.plan.spec.loading import shipped_experiments

_EXPERIMENTS = "experiments"
KINDS = (_EXPERIMENTS, *GROUPS)


@click.command("list")
@click.argument("kinds", metavar="[KIND]...", nargs=-1, type=click.Choice(KINDS))
@json_option
def command(kinds: Sequence[str], as_json: bool) -> None:
    """List the shipped experiments, and everything that a spec can name."""
    found = {kind: _entries(kind) for kind in kinds or KINDS}
    if as_json:
        print_json(found)
        return
    for kind, entries in found.items():
        table = Table.grid(padding=(0, 2))
        table.add_column("name", no_wrap=True)
        table.add_column("summary", overflow="fold")
        for entry in entries:
            package = "" if entry["package"] == "paceline" else f" (package {entry['package']})"
            table.add_row(f"  {entry['name']}", entry["summary"] + package)
        print(kind)
        plain_console().print(table)


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
