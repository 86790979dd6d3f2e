"""docs/reference/metrics.md names every metric, and says of it what the catalogue says."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.telemetry.catalogue import CATALOGUE
from paceline.telemetry.metrics_tables import tables

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
_BEGIN = "<!-- tables: python -m paceline.telemetry.metrics_tables -->\n"
_END = "<!-- end of tables -->"


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=lambda metric: metric.name)
def test_metric_has_one_row(metric):
    name = metric.name if metric.kind == "histogram" else metric.series[0]
    assert tables().count(f"| `{name}` | {metric.kind} |") == 1


def test_page_has_the_tables_as_they_are():
    text = PAGE.read_text(encoding="utf-8")
    (shown,) = [part.split(_END)[0] for part in text.split(_BEGIN)[1:]]
    assert shown == tables(), "write them anew: python -m paceline.telemetry.metrics_tables"
