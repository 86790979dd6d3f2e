"""Print the catalogue as Markdown tables for docs/reference/metrics.md."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.telemetry.catalogue import CATALOGUE, HOST, RANK, RUN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.telemetry.catalogue import Metric

# by what their names begin with, and the labels that all of a section have
_SECTIONS = (
    ("Host", ("host",), HOST),
    ("Control group", ("cgroup",), HOST),
    ("GPUs", ("gpu",), HOST),
    ("Run", ("run",), RUN),
    ("Rank", ("rank",), RANK),
    ("Training", ("training", "communication"), RANK),
    ("Sidecar", ("sidecar",), HOST),
)


def tables() -> str:
    """A table for each section; every metric in one."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for title, words, common in _SECTIONS:
        metrics = [metric for metric in CATALOGUE.values() if metric.name.split("_")[1] in words]
        yield f"### {title}"
        yield ""
        yield f"All have {_names(common)}."
        yield ""
        yield "| metric | type | further labels | meaning |"
        yield "|---|---|---|---|"
        for metric in metrics:
            yield _row(metric, common)
        yield ""


def _row(metric: Metric, common: tuple[str, ...]) -> str:
    further = _names(tuple(label for label in metric.labels if label not in common))
    name = metric.name if metric.kind == "histogram" else metric.series[0]
    return f"| `{name}` | {metric.kind} | {further} | {metric.help.replace('|', chr(92) + '|')} |"


def _names(labels: tuple[str, ...]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


if __name__ == "__main__":
    sys.stdout.write(tables())
