"""Output of commands: JSON, Markdown, and consoles that print text without changes.

Rich reads `[name]` as markup and `:name:` as an emoji. Paths, spec keys and messages of other
programs contain both, so markup is off and styles are given as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table

from paceline.base.host.messages import printable
from paceline.measure.records.files import json_text
from paceline.measure.records.rows import SCHEMA

# Control characters that JSON allows in strings, and on which a terminal acts.
_ESCAPED = {number: f"\\u{number:04x}" for number in range(127, 160)}


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document for other programs, after its schema.

    Dataclasses become objects, and numbers that JSON does not have become null.
    """
    print(json_text({"schema": SCHEMA, **document}).translate(_ESCAPED))


def print_text(text: str) -> None:
    """Print a text for people, which may contain names of a file of somebody else."""
    print(printable(text))


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or standard error without markup."""
    return _PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


class _PlainConsole(Console):
    """A console whose texts contain no control characters; only rich itself writes some."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None:
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment


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
    return printable(str(view))  # of a rich Text: without its styles
