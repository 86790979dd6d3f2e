"""Declaration of a metric, and everything that is derived from it.

A `Metric` states once how a value is read and what it means. The trace column, the Prometheus
series, the row of the docs page and the unit on dashboards are computed from it.

Names follow https://prometheus.io/docs/practices/naming/: base units, plural, unit last. The
prefix `paceline_` and the suffix of the type (`_total`, `_info`) are added here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
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
class Distribution:
    """Values counted by bucket, not cumulative; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds
    total: float  # sum of all values


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    read: returns the value from a reading of the scope; a mapping from label values to values where
        the metric has labels of its own; None (or no entry) where nothing was measured.
    column: where the value is in a row; a dot separates levels, and `{label}` stands for the value
        of a label. The default is the name.
    info_labels: labels whose values are what an `info` metric reports.
    in_trace: False for values that other files of the run directory contain already.
    every_s: shortest time between two readings; 0 reads at every tick.
    """

    name: str
    kind: Kind
    scope: Scope
    help: str
    read: Callable[[Any], Any]
    column: str = ""
    info_labels: tuple[str, ...] = ()
    in_trace: bool = True
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


@dataclass(frozen=True, slots=True)
class Sample:
    """Value of one series."""

    name: str
    labels: dict[str, str]
    value: float


def read_into(row: Row, metrics: Iterable[Metric], reading: object) -> None:
    """Read `metrics` from `reading` and put their values at their columns of `row`."""
    for metric in metrics:
        value = metric.read(reading)
        if not metric.labels:
            _put(row, metric.path, value)
            continue
        for label_values, each in (value or {}).items():
            values = label_values if isinstance(label_values, tuple) else (label_values,)
            labels = dict(zip(metric.labels, values, strict=True))
            _put(row, _filled(metric.path, labels), each)


def as_lists(row: Row) -> Row:
    """Return `row` with lists in place of mappings whose keys are 0, 1, 2, …"""
    return {
        name: list(value.values()) if isinstance(value, dict) and "0" in value else value
        for name, value in row.items()
    }


def samples_of(metric: Metric, scope_labels: Mapping[str, str], row: Row) -> Iterator[Sample]:
    """Yield the series of `metric` that `row` has values for."""
    for labels, value in _found(row, metric.path):
        if value is not None:
            yield from _samples(metric, {**scope_labels, **labels}, value)


def _samples(metric: Metric, labels: dict[str, str], value: Any) -> Iterator[Sample]:
    if metric.kind == "info":
        facts = value if isinstance(value, Mapping) else {metric.info_labels[0]: value}
        yield Sample(metric.series[0], {**labels, **facts}, 1.0)
    elif isinstance(value, Distribution):
        bucket, total, count = metric.series
        bounds = (*(repr(bound) for bound in value.bounds), "+Inf")
        cumulative = tuple(accumulate(value.counts))
        for bound, number in zip(bounds, cumulative, strict=True):
            yield Sample(bucket, {**labels, "le": bound}, float(number))
        yield Sample(total, labels, value.total)
        yield Sample(count, labels, float(cumulative[-1]))
    else:
        yield Sample(metric.series[0], labels, float(value))


def _put(row: Row, path: tuple[str, ...], value: Any) -> None:
    *levels, last = path
    if levels and value is None:
        return
    for level in levels:
        row = row.setdefault(level, {})
    row[last] = value


@cache
def _parts(column: str) -> tuple[str, ...]:
    return tuple(column.split("."))


@cache
def _placeholders(column: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\{(\w+)\}", column))


def _filled(path: tuple[str, ...], labels: Mapping[str, str]) -> tuple[str, ...]:
    """Replace `{label}` in each part; label values may contain braces of their own."""
    return tuple(re.sub(r"\{(\w+)\}", lambda found: str(labels[found[1]]), part) for part in path)


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
