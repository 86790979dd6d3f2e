"""A run's last values as a file in Prometheus's text format, for runs shorter than a scrape.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format; without times, as
node_exporter's textfile collector takes none. Without prometheus_client, which a sidecar that
serves no metrics does not load.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.records.files import write_text
from paceline.telemetry.measures import series, watch_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from paceline.telemetry.catalogue import Metric
    from paceline.telemetry.measures import Measure, Sample
    from paceline.telemetry.ticks import WatchTick

_TYPES = {"counter": "counter", "gauge": "gauge", "info": "gauge", "histogram": "histogram"}


def final_text(tick: WatchTick, host: str) -> str:
    """The run's values on `host`, and nothing of the host: node_exporter has that, and refuses
    what two files say."""
    return text_of(watch_values(host, tick))


def text_of(measures: Iterable[Measure]) -> str:
    """Measures in the text format, by metric, in the order in which each came first."""
    by_metric: dict[Metric, list[Measure]] = {}
    for measure in measures:
        by_metric.setdefault(measure.metric, []).append(measure)
    return "".join(
        line + "\n" for metric, found in by_metric.items() for line in _lines(metric, found)
    )


def series_name(sample: Sample) -> str:
    """A sample's name with its labels; OpenMetrics writes it alike."""
    labels = ",".join(
        f'{name}="{_escaped(value, quotes=True)}"' for name, value in sample.labels.items()
    )
    return f"{sample.name}{{{labels}}}"


def textfile_path(directory: Path, host: str, run: str) -> Path:
    """Where a run's values lie in node_exporter's directory: one file for all trials, as two with
    the same series would be refused."""
    return directory / f"paceline-{host}-{run}.prom"


def write_textfile(directory: Path, host: str, tick: WatchTick) -> None:
    """Replace the run's file in `directory` atomically. Raises OSError."""
    write_text(textfile_path(directory, host, tick.run), final_text(tick, host))


def _lines(metric: Metric, measures: list[Measure]) -> Iterator[str]:
    name = metric.name if metric.kind == "histogram" else metric.series[0]
    yield f"# HELP {name} {_escaped(metric.help)}"
    yield f"# TYPE {name} {_TYPES[metric.kind]}"
    for measure in measures:
        yield from map(_line, series(measure))


def _line(sample: Sample) -> str:
    return f"{series_name(sample)} {_number(sample.value)}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
