"""Write the help of all commands into docs/reference/cli.md, between two lines.

.venv/bin/python python/tools/cli_page.py [--check]

With --check it writes nothing, and fails if the page is old.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from paceline.cli.app import app

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/cli.md"
BEGIN = "<!-- help of the commands: python/tools/cli_page.py -->\n"
END = "<!-- end of the help -->"
_WIDTH = 80


def with_help(page: str) -> str:
    """Return the text of the page with the present help. Raises ValueError without both lines."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r}")
    root = click.Context(app, info_name="paceline", terminal_width=_WIDTH, **app.context_settings)
    parts = "".join(f"### `{name}`\n\n```text\n{text}\n```\n\n" for name, text in _helps(app, root))
    return f"{before}{BEGIN}\n{parts}{END}{after}"


def _helps(group: click.Group, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield path and help of each command of a group, in the order of its own help."""
    for name in group.commands:
        command = group.get_command(context, name)
        assert command is not None, name
        below = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _helps(command, below)
        else:
            yield below.command_path, below.get_help()


if __name__ == "__main__":
    OLD = PAGE.read_text("utf-8")
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(with_help(OLD), "utf-8")
    elif with_help(OLD) != OLD:
        sys.exit(f"{PAGE.name} is old: run python/tools/cli_page.py")
