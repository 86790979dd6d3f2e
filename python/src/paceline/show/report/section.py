"""Sections: titles, sentences, tables and figures as values, and how the terminal shows them.

`document.html.j2` shows the same values on the page. A column states from which detail on it is
shown, so a table has one list of columns for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from paceline.show.report.figures.charts import Chart

Item = TypeVar("Item")
WIDE_COLUMNS = 120  # of a terminal, from which more figures are shown
_LEAST_BAR, _MOST_BAR = 6, 30  # columns of a terminal
_STYLES = {
    "": "", "soft": "dim", "sum": "bold", "best": "",
    "yes": "green", "no": "bold red", "unknown": "yellow", "lossy": "cyan", "bar": "cyan",
}  # fmt: skip


class Detail(IntEnum):
    """The room for a table."""

    NARROW = 0  # a terminal of 80 columns
    WIDE = 1  # one of 120 columns, and the page as it opens
    PAGE = 2  # the page after a click on the button of the table


class Cell(NamedTuple):
    """A cell of a table. style: a key of the styles, which are classes of the page, too."""

    text: str
    soft: str = ""  # beside the text, less prominent
    style: str = ""
    tip: str = ""  # shown on the page while the mouse is over it


class Bar(NamedTuple):
    """A bar in a terminal, as shares of the longest one: solid to `low`, pale to `high`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """A column: its heading, which may have several lines, and the cell of an item.

    kind: numbers are aligned to the right; a text may be broken into lines, and an id of a
    configuration or trial after a dot. names_row: a reader finds the row by it.
    """

    heading: str
    value: Callable[[Item], Cell | str]
    kind: Literal["number", "name", "text", "id"] = "number"
    detail: Detail = Detail.NARROW  # from which it is shown
    tip: str = ""
    names_row: bool = False

    @property
    def label(self) -> str:
        """The heading on one line."""
        return self.heading.strip().replace("-\n", "").replace("\n", " ")


def _plain(item: object) -> str:
    del item
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Generic[Item]):
    """Items with their columns. style: of an item's line, a key of the styles.

    bar: what a terminal draws at the end of an item's line if it has room.
    """

    columns: Sequence[Column[Item]]
    items: Sequence[Item]
    title: str = ""
    style: Callable[[Item], str] = _plain
    gap: int = 2  # spaces between two columns of the terminal
    bar: Callable[[Item], Bar] | None = None

    def shown(self, detail: Detail) -> list[Column[Item]]:
        return [column for column in self.columns if column.detail <= detail]

    def row_names(self, detail: Detail) -> list[Column[Item]]:
        """Return the shown columns that name a row: those marked so, else the first."""
        shown = self.shown(detail)
        return [column for column in shown if column.names_row] or shown[:1]

    def lines(self, detail: Detail) -> Iterator[tuple[str, list[Cell]]]:
        """Yield style and cells of each item."""
        columns = self.shown(detail)
        for item in self.items:
            values = [column.value(item) for column in columns]
            cells = [Cell(value) if isinstance(value, str) else value for value in values]
            yield self.style(item), cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Figures of the hosts of one trial."""

    name: str
    trial: str
    pairs: Sequence[Sequence[Chart]]  # of each host
    more: Sequence[Chart]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The repeats of one configuration, of which the page shows one at a time."""

    name: str
    repeats: Sequence[Repeat]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the output, shown in the order of its fields."""

    title: str = ""
    anchor: str = ""  # the page links to it
    folded: bool = False  # a reader of the page clicks on the title to see the rest
    intro: str = ""  # how to read what follows
    charts: Sequence[Chart] = ()
    table: Table[Any] | None = None
    sentences: Sequence[str] = ()
    code: str = ""
    legend: Sequence[tuple[str, str]] = ()  # words and colours
    cards: Sequence[Card] = ()
    parts: Sequence[Section] = ()
    notes: Sequence[str] = ()

    def marked(self, mark: str) -> Section:
        """Return the section with a mark in the titles of all its figures and tables."""

        def all_of(charts: Sequence[Chart]) -> list[Chart]:
            return [replace(chart, title=chart.title + mark) for chart in charts]

        def repeat_of(repeat: Repeat) -> Repeat:
            pairs = [all_of(pair) for pair in repeat.pairs]
            return replace(repeat, pairs=pairs, more=all_of(repeat.more))

        table = self.table
        if table is not None and not table.title.endswith(mark):
            table = replace(table, title=(table.title + mark).removeprefix(", "))
        return replace(
            self,
            charts=all_of(self.charts),
            table=table,
            cards=[
                replace(card, repeats=[repeat_of(each) for each in card.repeats])
                for card in self.cards
            ],
            parts=[part.marked(mark) for part in self.parts],
        )

    def figures(self) -> Iterator[tuple[str, Chart]]:
        """Yield all figures with their titles; those of one trial begin with its id."""
        for chart in self.charts:
            yield chart.title, chart
        for card in self.cards:
            for repeat in card.repeats:
                for chart in (*(c for pair in repeat.pairs for c in pair), *repeat.more):
                    yield f"{repeat.trial}: {chart.title}", chart
        for part in self.parts:
            yield from part.figures()


def detail_of(width: int) -> Detail:
    """Return the detail that fits a terminal of so many columns."""
    return Detail.WIDE if width >= WIDE_COLUMNS else Detail.NARROW


def terminal_view(section: Section, detail: Detail = Detail.NARROW) -> RenderableType:
    """Show a section in the terminal, without its figures."""
    blocks: list[RenderableType] = []
    if section.title:
        blocks.append(Text(section.title, style="bold"))
    if section.intro:
        blocks.append(Text(section.intro))
    if section.table is not None:
        blocks.append(terminal_table(section.table, detail))
    if section.sentences:
        blocks.append(Group(*map(Text, section.sentences)))
    blocks += [terminal_view(part, detail) for part in section.parts]
    if section.notes:
        blocks.append(Group(*(Text(note, style="dim") for note in section.notes)))
    return spaced(blocks)


def spaced(blocks: Sequence[RenderableType]) -> Group:
    """Put an empty line between two blocks."""
    found: list[RenderableType] = []
    for block in blocks:
        found += [Text(""), block] if found else [block]
    return Group(*found)


def terminal_table(
    table: Table[Any], detail: Detail = Detail.NARROW, bars_within: int | None = None
) -> RichTable:
    """Return a table for the terminal, which shrinks its texts to the width.

    bars_within: columns of the terminal, to draw the bars of the items; None draws none.
    """
    columns = table.shown(detail)
    lines = list(table.lines(detail))
    found = _FittingTable(
        title=table.title or None,
        title_justify="left",
        title_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, table.gap, 0, 0),
        header_style="dim",
        show_header=any(column.heading for column in columns),
    )
    for column in columns:
        found.add_column(
            column.heading,
            justify="right" if column.kind == "number" else "left",
            no_wrap=column.kind in ("number", "name"),
            overflow="fold",
        )
    bars: list[Text] = []
    if table.bar is not None and bars_within is not None:
        room = bars_within - _text_width(table, columns, lines) - table.gap
        if room >= _LEAST_BAR:
            bars = [_drawn(table.bar(item), min(room, _MOST_BAR)) for item in table.items]
            found.add_column("", no_wrap=True)
    for number, (style, cells) in enumerate(lines):
        shown: list[RenderableType] = [
            _Ids(cell.text) if column.kind == "id" else _text(cell)
            for column, cell in zip(columns, cells, strict=True)
        ]
        found.add_row(*shown, *bars[number : number + 1], style=_STYLES[style])
    return found


def _text_width(
    table: Table[Any], columns: Sequence[Column[Any]], lines: Sequence[tuple[str, list[Cell]]]
) -> int:
    """Return the columns of a terminal that a table needs if no text is broken."""
    texts = [
        [column.heading, *(str(_text(cells[n])) for _, cells in lines)]
        for n, column in enumerate(columns)
    ]
    widths = [max(cell_len(line) for text in each for line in text.split("\n")) for each in texts]
    return sum(widths) + table.gap * (len(widths) - 1)


def _drawn(bar: Bar, width: int) -> Text:
    """Draw a bar; an interval of any length has a place."""
    high = round(bar.high * width)
    low = min(round(bar.low * width), high - 1) if bar.high > bar.low else high
    return Text("█" * low + "▒" * (high - low), style=_STYLES["bar"])


class _FittingTable(RichTable):
    """A table that breaks texts between words where the terminal has room for the longest ones."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least, most = [], []
        for column in self.columns:
            cells = [column.header, *column.cells]
            widths = [Measurement.get(console, options, cell) for cell in cells]
            most.append(max(width.maximum for width in widths))
            shortest = max(width.minimum for width in widths)
            least.append(most[-1] if column.no_wrap else shortest)
        gaps = (len(most) - 1) * self.padding[1]
        spare, wanted = options.max_width - gaps - sum(least), sum(most) - sum(least)
        fits = 0 <= spare < wanted
        for column, low, high in zip(self.columns, least, most, strict=True):
            column.width = low + spare * (high - low) // wanted if fits else None
        yield from super().__rich_console__(console, options)


def _text(cell: Cell) -> Text:
    text = Text(cell.text, style=_STYLES[cell.style])
    return text.append(f" {cell.soft}", style="dim") if cell.soft else text


@dataclass(frozen=True, slots=True)
class _Ids:
    """Lines with an id of a configuration or trial, each broken with an indent only after a dot."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        lines: list[str] = []
        for each in self.text.splitlines():
            lines.append("")
            for part in each.replace(".", ".\0").split("\0"):
                if lines[-1].strip() and len(lines[-1]) + len(part) > options.max_width:
                    lines.append("  ")
                lines[-1] += part
        yield Text("\n".join(lines))

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, self.text.replace("\n", ".").split("."))) + len("  .")
        most = max(map(len, self.text.splitlines()), default=0)
        return Measurement(min(longest, most), most).with_maximum(options.max_width)
