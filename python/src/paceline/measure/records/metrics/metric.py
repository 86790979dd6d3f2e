"""Declaration of a metric, and everything that is derived from it.

A `Metric` states once what a value means and where it is in a row. The type of the trace column,
the Prometheus series, the row of the docs page and the unit on dashboards are computed from it. The
readers in `telemetry` put the values at these columns.

Names follow https://prometheus.io/docs/practices/naming/: base units, plural, unit last. The
prefix `paceline_` and the suffix of the type (`_total`, `_info`) are added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

Kind = Literal["counter", "gauge", "info", "histogram"]
Unit = Literal["", "seconds", "bytes", "hertz", "celsius", "watts", "ratio", "cores"]
Row = dict[str, Any]

# Units of Grafana (https://grafana.com/docs/grafana/latest/panels-visualizations/configure-standard-options/)
# for a value, and for its increase per second.
_GRAFANA_UNITS: Mapping[Unit, tuple[str, str]] = {
    "": ("short", "count:/s"),
    "seconds": ("s", "percentunit"),
    "bytes": ("bytes", "Bps"),
    "hertz": ("hertz", "hertz"),
    "celsius": ("celsius", "celsius"),
    "watts": ("watt", "watt"),
    "ratio": ("percentunit", "percentunit"),
    "cores": ("short", "short"),
}


@dataclass(frozen=True, slots=True)
class Scope:
    """Subject of a group of metrics; all of them read from the same object.

    `labels` identify the subject. `file` is the file in the run directory that has the values.
    """

    title: str
    labels: tuple[str, ...]
    file: str


HOST = Scope("Host", ("host",), "trace.jsonl")
CGROUP = Scope("Control group of the watched processes", ("host", "run"), "trace.jsonl")
RUN = Scope("Run", ("host", "run"), "trial.json and outcome.json")
RUN_PROCESSES = Scope("Processes of the run", ("host", "run"), "trace.jsonl")
RANK = Scope("Processes of a rank", ("host", "run", "rank"), "ranks.jsonl")
TRAINING = Scope("Training", ("host", "run", "rank"), "steps.jsonl and communication.jsonl")
SIDECAR = Scope("Sidecar", ("host", "run"), "trace.jsonl")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    column: where the value is in a row; a dot separates levels, and `{label}` stands for the value
        of a label. The default is the name.
    label_values: all values of the label, where they are fixed and part of the column's name.
    info_labels: labels whose values are what an `info` metric reports.
    in_trace: False for values that other files of the run directory contain already.
    required: every row of the trace has a value.
    every_s: shortest time between two readings; 0 reads at every tick.
    """

    name: str
    kind: Kind
    scope: Scope
    help: str
    column: str = ""
    label_values: tuple[str, ...] = ()
    info_labels: tuple[str, ...] = ()
    in_trace: bool = True
    required: bool = False
    every_s: float = 0.0

    @property
    def path(self) -> tuple[str, ...]:
        """Path of the value in a row, a part for each level."""
        return _parts(self.column or self.name)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of its own, in addition to those of the scope."""
        return _placeholders(self.column)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of plain values; none for values by a label, which a row nests."""
        if len(self.path) > 1:
            return ()
        if not self.labels:
            return self.path
        label = f"{{{self.labels[0]}}}"
        return tuple(self.column.replace(label, value) for value in self.label_values)

    @property
    def is_whole(self) -> bool:
        """Return whether all values are whole numbers: bytes, and numbers of things."""
        return self.unit in ("", "bytes")

    @property
    def unit(self) -> Unit:
        """Unit, which is the last word of the name; empty for numbers of things."""
        last = self.name.rpartition("_")[2]
        return cast("Unit", last) if last in _GRAFANA_UNITS else ""

    @property
    def full_name(self) -> str:
        """Name in Prometheus, without the suffix of the type."""
        return f"paceline_{self.name}"

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series, as used in queries."""
        suffixes = {
            "counter": ("_total",),
            "gauge": ("",),
            "info": ("_info",),
            "histogram": ("_bucket", "_sum", "_count"),
        }
        return tuple(self.full_name + suffix for suffix in suffixes[self.kind])

    def grafana_unit(self, *, rate: bool = False) -> str:
        """Return Grafana's name of the unit, or of the unit per second (`rate`)."""
        return _GRAFANA_UNITS[self.unit][rate]


def as_lists(row: Row) -> Row:
    """Return `row` with lists in place of mappings whose keys are 0, 1, 2, …"""
    return {
        name: list(value.values()) if isinstance(value, dict) and "0" in value else value
        for name, value in row.items()
    }


def values_in(row: Row, metric: Metric) -> Iterator[tuple[dict[str, str], Any]]:
    """Yield (labels of its own, value) for each value of `metric` that `row` has."""
    return ((labels, value) for labels, value in _found(row, metric.path) if value is not None)


@cache
def _parts(column: str) -> tuple[str, ...]:
    return tuple(column.split("."))


@cache
def _placeholders(column: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\{(\w+)\}", column))


def _found(value: Any, path: tuple[str, ...]) -> Iterator[tuple[dict[str, str], Any]]:
    """Yield (labels, value) of all entries of a row at a path."""
    if not path:
        yield {}, value
        return
    part, rest = path[0], path[1:]
    if "{" not in part:
        if isinstance(value, dict) and part in value:
            yield from _found(value[part], rest)
        return
    items = enumerate(value) if isinstance(value, list) else value.items()
    pattern = _pattern(part)
    for key, inner in items:
        if match := pattern.fullmatch(str(key)):
            for labels, each in _found(inner, rest):
                yield {**match.groupdict(), **labels}, each


@cache
def _pattern(part: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>.+)", part), re.DOTALL)
