"""Names and labels of metrics keep to Prometheus's rules.

https://prometheus.io/docs/practices/naming/, OpenMetrics 1.0.
"""

import re

import pytest

from paceline.telemetry.catalogue import CATALOGUE

UNITS = (
    "seconds", "bytes", "ratio", "hertz", "watts", "celsius", "cores", "processes", "threads",
    "files", "images", "steps", "operations", "faults", "switches", "periods", "packets",
    "samples", "restarts", "watches",
)  # fmt: skip
WITHOUT_UNIT = {
    "paceline_host_iowait_valid", "paceline_host_load_average", "paceline_rank_failed",
    "paceline_training_epoch", "paceline_training_loss",
}  # fmt: skip
BOUNDED = {
    "host", "run", "rank", "mode", "core", "window", "resource", "kind", "device", "sensor", "gpu",
    "clock", "phase", "operation", "version",
}  # fmt: skip


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=lambda metric: metric.name)
def test_metric_keeps_to_the_rules(metric):
    assert re.fullmatch(r"paceline(_[a-z0-9]+)+", metric.name)
    assert not metric.name.endswith(("_total", "_info", "_count", "_sum", "_bucket"))
    if metric.kind != "info" and metric.name not in WITHOUT_UNIT:
        assert metric.name.endswith(UNITS)
        assert set(metric.labels) <= BOUNDED
    assert metric.labels[0] == "host"
    assert metric.help.endswith(".")


def test_no_two_metrics_share_a_series():
    series = [name for metric in CATALOGUE.values() for name in metric.series]
    assert len(series) == len(set(series))
