"""The form of the terminal's tables in which each line is a configuration with some numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_NAME_WIDTH = 27


def lines_table(
    title: str,
    remarks: Sequence[str],
    columns: Mapping[str, str],
    lines: Iterable[Mapping[str, str]],
    name_width: int,
) -> Table:
    """Return a table of the names of configurations and their numbers, with remarks below.

    columns: the heading of each number, by its key in a line. lines: with the key "name", too.
    name_width: characters that the other columns leave for the names.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption="\n".join(remarks),
        caption_justify="left",
        caption_style="",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    table.add_column("\nconfiguration", max_width=max(_NAME_WIDTH, name_width))
    for heading in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(Text(line["name"]), *(Text(line[key]) for key in columns))
    return table
