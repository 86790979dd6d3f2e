"""A dashboard as its JSON says, and how Grafana fills in its queries and names.

Only what `monitoring.dashboards` writes is read: another dashboard may have more.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PLACEHOLDER = re.compile(r"\{\{\s*(.+?)\s*\}\}")
_SPECIAL = re.compile(r"([\\^$*+?.()|\[\]{}])")
_SCRAPE_S = 1  # of the data source, as it is provisioned


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel."""

    ref: str
    expr: str
    legend: str
    instant: bool


@dataclass(frozen=True, slots=True)
class Threshold:
    """From `value` on (None: from the start) figures have this colour."""

    value: float | None
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A table's columns by the name that the answer has: order, heading, which are not shown; by
    heading what overrides set: unit, decimals, width."""

    order: Mapping[str, int]
    headings: Mapping[str, str]
    hidden: frozenset[str]
    units: Mapping[str, str]
    decimals: Mapping[str, int]
    widths_px: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Place and size are in Grafana's grid of 24 columns."""

    kind: str  # timeseries, stat, bargauge, table
    title: str
    description: str
    unit: str
    decimals: int | None
    low: float | None
    high: float | None
    no_value: str
    thresholds: tuple[Threshold, ...]
    threshold_lines: bool
    stacked: bool
    x: int
    y: int
    width: int
    height: int
    targets: tuple[Target, ...]
    columns: Columns


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    closed: bool
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """An annotation: where its query has a value, panels have a line, unless it is off."""

    name: str
    expr: str
    colour: str
    on: bool


@dataclass(frozen=True, slots=True)
class Board:
    title: str
    description: str
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a dashboard shows: which run, from when to when, and how finely; all hosts and ranks."""

    run: str
    start_unix_s: float
    end_unix_s: float
    step_s: int

    @property
    def range_s(self) -> int:
        return max(1, round(self.end_unix_s - self.start_unix_s))


def read_board(path: Path) -> Board:
    document = json.loads(path.read_text("utf-8"))
    rows: list[Row] = []
    for each in document["panels"]:
        if each["type"] == "row":
            rows.append(Row(each["title"], each["collapsed"], ()))
        last = rows[-1]
        shown = each.get("panels", []) if each["type"] == "row" else [each]
        rows[-1] = Row(last.title, last.closed, (*last.panels, *map(_panel, shown)))
    marks = (
        Mark(each["name"], each["expr"], each["iconColor"], each["enable"])
        for each in document["annotations"]["list"]
    )
    return Board(document["title"], document["description"], tuple(rows), tuple(marks))


def filled(expr: str, window: Window) -> str:
    """A query with the dashboard's variables as Grafana sets them, all hosts and ranks chosen.

    $__rate_interval is the larger of step + scrape interval and four scrape intervals:
    https://grafana.com/docs/grafana/latest/datasources/prometheus/template-variables/
    Raises ValueError for a variable that is not known.
    """
    values = {
        "$__rate_interval": f"{max(window.step_s + _SCRAPE_S, 4 * _SCRAPE_S)}s",
        "$__interval": f"{window.step_s}s",
        "$__range": f"{window.range_s}s",
        # between quotes of a regular expression, so backslashes stand twice
        "$run": _SPECIAL.sub(r"\\\\\1", window.run),
        "$host": ".*",
        "$rank": ".*",
    }
    for name, value in values.items():
        expr = re.sub(rf"{re.escape(name)}\b", value.replace("\\", r"\\"), expr)
    left = re.search(r"\$\w+", expr)
    if left:
        raise ValueError(f"{expr}: the variable {left[0]} is not known")
    return expr


def legend(pattern: str, labels: Mapping[str, str]) -> str:
    """A series' name. A label that the series lacks stays by its name, as in Grafana."""
    return _PLACEHOLDER.sub(lambda found: labels.get(found[1], found[1]), pattern)


def colour_at(value: float, thresholds: tuple[Threshold, ...]) -> str:
    """The colour of the highest threshold that `value` has reached."""
    reached = [t for t in thresholds if t.value is None or t.value <= value]
    return max(reached, key=lambda t: float("-inf") if t.value is None else t.value).colour


def _panel(each: Mapping[str, Any]) -> Panel:
    defaults = each["fieldConfig"]["defaults"]
    custom = defaults.get("custom", {})
    place = each["gridPos"]
    targets = (
        Target(t["refId"], t["expr"], t["legendFormat"], t["instant"]) for t in each["targets"]
    )
    steps = defaults["thresholds"]["steps"]
    return Panel(
        kind=each["type"],
        title=each["title"],
        description=each["description"],
        unit=defaults["unit"],
        decimals=defaults.get("decimals"),
        low=defaults.get("min"),
        high=defaults.get("max"),
        no_value=defaults["noValue"],
        thresholds=tuple(Threshold(step.get("value"), step["color"]) for step in steps),
        threshold_lines="thresholdsStyle" in custom,
        stacked="stacking" in custom,
        x=place["x"],
        y=place["y"],
        width=place["w"],
        height=place["h"],
        targets=tuple(targets),
        columns=_columns(each),
    )


def _columns(each: Mapping[str, Any]) -> Columns:
    organized: list[Mapping[str, Any]] = [
        step["options"] for step in each.get("transformations", []) if step["id"] == "organize"
    ]
    options = organized[0] if organized else {}
    return Columns(
        order=options.get("indexByName", {}),
        headings=options.get("renameByName", {}),
        hidden=frozenset(name for name, no in options.get("excludeByName", {}).items() if no),
        units=_overridden(each, "unit"),
        decimals=_overridden(each, "decimals"),
        widths_px=_overridden(each, "custom.width"),
    )


def _overridden(each: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """The values of one setting by the field's name."""
    return {
        override["matcher"]["options"]: found["value"]
        for override in each["fieldConfig"]["overrides"]
        for found in override["properties"]
        if found["id"] == setting
    }
