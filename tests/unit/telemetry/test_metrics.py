"""The declared metrics follow Prometheus's rules, and the docs page lists them.

https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from paceline.records.rows import HostSample, RankSample
from paceline.telemetry.metrics import METRICS, RANK
from paceline.telemetry.metrics.docs_page import BEGIN, END, tables, with_tables
from paceline.telemetry.metrics.metric import Metric

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
COUNTED = (
    "cores", "processes", "threads", "files", "samples", "steps", "operations", "faults",
    "switches", "periods", "packets", "restarts",
)  # fmt: skip
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
        assert metric.name.endswith(COUNTED)
    if metric.name != "run":  # its facts are bounded by the spec
        assert {*metric.scope.labels, *metric.labels, *metric.info_labels} <= BOUNDED


def test_no_two_metrics_share_a_series_or_a_column() -> None:
    series = Counter(name for metric in METRICS for name in metric.series)
    columns = Counter((m.scope.file, m.path) for m in METRICS if m.in_trace)
    assert [name for name, count in (series + columns).items() if count > 1] == []


@pytest.mark.parametrize(
    ("kind", "known"), [(HostSample, {"unix_s"}), (RankSample, {"unix_s", "rank", "pid"})]
)
def test_trace_has_the_columns_that_the_analysis_reads(kind: type, known: set[str]) -> None:
    columns = {
        metric.path[0]
        for metric in METRICS
        if metric.in_trace and (metric.scope is RANK) == (kind is RankSample)
    }
    columns |= {f"{which}_page_faults" for which in ("minor", "major")}
    columns |= {
        f"{prefix}{which}_context_switches"
        for which in ("voluntary", "involuntary")
        for prefix in ("run_", "")
    }
    read = {field.name for field in fields(kind)}
    assert read - known <= columns


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
