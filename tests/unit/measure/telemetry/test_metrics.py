"""The declared metrics follow Prometheus's rules, and the docs page lists them.

https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from paceline.measure.records.metrics import METRICS
from paceline.measure.records.metrics.docs_page import BEGIN, END, tables, with_tables
from paceline.measure.records.metrics.metric import Metric
from paceline.measure.records.tables import HOST_SAMPLES, RANK_SAMPLES

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "metrics.md"
WITHOUT_UNIT = {
    "host_load_average", "rank_failed", "training_epoch", "training_loss",
}  # fmt: skip
BOUNDED = {
    "host", "run", "rank", "mode", "core", "window", "resource", "kind", "device", "sensor", "gpu",
    "phase", "operation", "version", "name",
}  # fmt: skip


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_metric_follows_the_rules(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert not metric.name.endswith(("_total", "_info", "_count", "_sum", "_bucket"))
    assert metric.scope.labels[0] == "host"
    assert metric.help.endswith(".")
    if metric.unit:
        assert metric.name.endswith(f"_{metric.unit}")
    elif metric.kind != "info" and metric.name not in WITHOUT_UNIT:
        assert metric.name.endswith("s"), "a plural: it counts things"
    if metric.name != "run":  # its facts are bounded by the spec
        assert {*metric.scope.labels, *metric.labels, *metric.info_labels} <= BOUNDED


def test_no_two_metrics_share_a_series_or_a_column() -> None:
    series = Counter(name for metric in METRICS for name in metric.series)
    columns = Counter((m.scope.file, m.path) for m in METRICS if m.in_trace)
    assert [name for name, count in (series + columns).items() if count > 1] == []


def test_formats_of_the_trace_have_the_declared_columns() -> None:
    whole = {
        "ram_used_bytes",
        "minor_page_faults",
        "run_threads",
        "run_involuntary_context_switches",
    }
    fractions = {"unix_s", "run_cpu_seconds", "cpu_frequency_hertz", "sidecar_cpu_seconds"}
    types = HOST_SAMPLES.types
    assert {types[name] for name in whole} == {pl.Int64}
    assert {types[name] for name in fractions} == {pl.Float64}
    assert types["core_busy_s"] == pl.List(pl.Float64)
    assert not {"disks", "gpus", "run", "training_steps"} & types.keys()
    assert {"unix_s", "run_rss_bytes"} <= set(HOST_SAMPLES.required)
    assert "run_pss_bytes" not in HOST_SAMPLES.required
    assert RANK_SAMPLES.types["voluntary_context_switches"] == pl.Int64
    assert RANK_SAMPLES.required[:4] == ("unix_s", "rank", "pid", "processes")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_docs_have_one_row_for_each_metric(metric: Metric) -> None:
    name = metric.full_name if metric.kind == "histogram" else metric.series[0]
    assert tables().count(f"| `{name}` | {metric.kind} |") == 1


def test_docs_page_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")
    assert page == with_tables(page), f"regenerate it: {BEGIN}"


def test_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the lines"):
        with_tables("# Metrics\n")
    assert with_tables(f"a\n{BEGIN}old\n{END}b") == f"a\n{BEGIN}{tables()}{END}b"
