"""Text and tables for the terminal as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType


def markdown(view: RenderableType) -> str:
    """Return groups, texts and tables as paragraphs and tables of Markdown."""
    return "\n\n".join(block for block in _blocks(view) if block)


def _blocks(view: RenderableType) -> Iterator[str]:
    if isinstance(view, Group):
        for each in view.renderables:
            yield from _blocks(each)
    elif isinstance(view, Padding):
        yield from _blocks(view.renderable)
    elif isinstance(view, Table):
        if view.title:
            yield f"**{_plain(view.title)}**"
        yield _table(view)
    else:
        yield _plain(view)


def _table(table: Table) -> str:
    headers = [_cell(column.header) for column in table.columns]
    rules = ["---:" if column.justify == "right" else "---" for column in table.columns]
    columns = [[_cell(cell) for cell in column.cells] for column in table.columns]
    lines = [headers, rules, *zip(*columns, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: RenderableType) -> str:
    words = _plain(cell).replace("-\n", "").replace("|", "\\|")
    return " ".join(words.split())


def _plain(view: RenderableType) -> str:
    return str(view)  # of a rich Text: without its styles
