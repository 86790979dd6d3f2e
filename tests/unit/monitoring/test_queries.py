"""Units of panels come from the declarations of metrics."""

from __future__ import annotations

import pytest
from monitoring.dashboards.queries import rate, unit_of


@pytest.mark.parametrize(
    ("expr", "unit"),
    [
        ("paceline_host_memory_used_bytes", "bytes"),
        (rate("paceline_host_disk_read_bytes_total", "", ("host",)), "Bps"),
        (rate("paceline_host_core_busy_seconds_total", "", ("core",)), "percentunit"),
        (rate("paceline_training_steps_total", "", ("run",)), "count:/s"),
        ("paceline_gpu_power_watts", "watt"),
    ],
)
def test_unit_is_that_of_the_metric_or_of_its_rate(expr: str, unit: str) -> None:
    assert unit_of(expr) == unit


@pytest.mark.parametrize(
    "expr",
    ["paceline_host_memory_used_bytes / paceline_host_memory_size_bytes", "up", "paceline_x"],
)
def test_unit_of_several_or_unknown_metrics_must_be_stated(expr: str) -> None:
    with pytest.raises(ValueError, match="state a unit"):
        unit_of(expr)
