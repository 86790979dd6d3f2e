"""Measures in Prometheus's text format 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format

By hand, for the names of series stay the same from scrape to scrape, and are remembered here:
prometheus_client 0.26 builds them anew, which with 64 ranks takes five times as long (measured on
an AMD EPYC: 10.8 against 2.0 ms). It also has to be loaded, which one that serves nothing need not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.telemetry.measures import series, series_values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.telemetry.catalogue import Metric
    from paceline.telemetry.measures import Measure, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TYPES = {"counter": "counter", "gauge": "gauge", "info": "gauge", "histogram": "histogram"}


class Exposition:
    """Writes measures again and again; what one writing did not need is forgotten."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}

    def text_of(self, measures: Iterable[Measure]) -> str:
        """By metric, in the order in which each came first."""
        before, self._names = self._names, {}
        by_metric: dict[str, list[str]] = {}
        for measure in measures:
            metric, labels, value = measure
            key = (metric.name, labels)
            names = self._names[key] = before.get(key) or _names_of(measure)
            lines = by_metric.get(metric.name)
            if lines is None:
                lines = by_metric[metric.name] = _header(metric)
            values = series_values(value)
            lines += [f"{name} {_number(each)}" for name, each in zip(names, values, strict=True)]
        return "".join(f"{line}\n" for lines in by_metric.values() for line in lines)


def series_name(sample: Sample) -> str:
    """A sample's name with its labels; OpenMetrics writes it alike."""
    labels = ",".join(
        f'{name}="{_escaped(value, quotes=True)}"' for name, value in sample.labels.items()
    )
    return f"{sample.name}{{{labels}}}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    if math.isnan(value):
        return "NaN"
    return "+Inf" if value > 0 else "-Inf"


def _header(metric: Metric) -> list[str]:
    name = metric.name if metric.kind == "histogram" else metric.series[0]
    return [f"# HELP {name} {_escaped(metric.help)}", f"# TYPE {name} {_TYPES[metric.kind]}"]


def _names_of(measure: Measure) -> tuple[str, ...]:
    return tuple(series_name(sample) for sample in series(measure))
