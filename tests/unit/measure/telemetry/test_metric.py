"""One declaration gives the series, the row of the docs page and the unit on dashboards."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.measure.records.metrics import HOST, RUN
from paceline.measure.records.metrics.docs_page import tables
from paceline.measure.records.metrics.metric import Metric, as_lists
from paceline.measure.telemetry.exporter import Snapshot, families
from paceline.measure.telemetry.training import Distribution

ANSWER = Metric(
    name="host_answer_bytes",
    kind="counter",
    scope=HOST,
    help="A throw-away metric.",
    column="answers.{computer}.bytes",
)


def metric(**changes: object) -> Metric:
    declared = {"name": "host_x", "kind": "gauge", "scope": HOST, "help": "A metric."}
    return Metric(**{**declared, **changes})  # type: ignore[arg-type]


def samples(declared: Metric, row: dict[str, Any]) -> list[tuple[str, dict[str, str], float]]:
    snapshot = Snapshot(host="h", run="r", row=row)
    return [
        (sample.name, sample.labels, sample.value)
        for family in families([declared], snapshot)
        for sample in family.samples
    ]


def test_declaration_is_in_the_exposition_the_docs_and_the_dashboards() -> None:
    assert samples(ANSWER, {"answers": {"deep thought": {"bytes": 42}}}) == [
        ("paceline_host_answer_bytes_total", {"host": "h", "computer": "deep thought"}, 42.0)
    ]
    assert (
        "| `paceline_host_answer_bytes_total` | counter | bytes | `computer` | "
        "`answers.{computer}.bytes` | A throw-away metric. |"
    ) in tables([ANSWER])
    assert (ANSWER.grafana_unit(), ANSWER.grafana_unit(rate=True)) == ("bytes", "Bps")


def test_value_that_was_not_measured_is_no_series() -> None:
    assert samples(metric(), {"host_x": 5}) == [("paceline_host_x", {"host": "h"}, 5.0)]
    assert samples(metric(), {"host_x": None}) == samples(metric(), {}) == []


def test_label_may_be_part_of_a_columns_name() -> None:
    declared = metric(column="{kind}_faults", kind="counter", label_values=("minor", "major"))
    assert declared.columns == ("minor_faults", "major_faults")
    assert samples(declared, {"minor_faults": 1, "major_faults": 2, "other": 3}) == [
        ("paceline_host_x_total", {"host": "h", "kind": "minor"}, 1.0),
        ("paceline_host_x_total", {"host": "h", "kind": "major"}, 2.0),
    ]


def test_metrics_with_one_label_share_a_column() -> None:
    size = metric(name="b", column="gpus.{gpu}.size")
    row = {"gpus": {"0": {"used": 1, "size": 1}, "1": {"size": None}}}
    expected = [("paceline_b", {"host": "h", "gpu": "0"}, 1.0)]
    assert samples(size, row) == samples(size, as_lists(row)) == expected


@pytest.mark.parametrize("name", ["{x}", "a.b", "line\nbreak", 'quo"te'])
def test_label_values_may_hold_anything(name: str) -> None:
    declared = metric(column="sensors.{sensor}")
    assert samples(declared, {"sensors": {name: 1}}) == [
        ("paceline_host_x", {"host": "h", "sensor": name}, 1.0)
    ]


def test_numbered_labels_become_a_list_in_the_trace() -> None:
    declared = metric(column="cores.{core}")
    row = as_lists({"cores": {"0": 1.5, "1": 2.5}})
    assert row == {"cores": [1.5, 2.5]}
    assert [labels["core"] for _, labels, _ in samples(declared, row)] == ["0", "1"]


def test_info_metric_reports_facts_as_labels() -> None:
    facts = metric(kind="info", scope=RUN, info_labels=("a", "b"))
    assert samples(facts, {"host_x": {"a": "1", "b": "2"}}) == [
        ("paceline_host_x_info", {"host": "h", "run": "r", "a": "1", "b": "2"}, 1.0)
    ]
    one = metric(kind="info", info_labels=("name",), column="g.{gpu}.name")
    assert samples(one, {"g": {"0": {"name": "H200"}}}) == [
        ("paceline_host_x_info", {"host": "h", "gpu": "0", "name": "H200"}, 1.0)
    ]


def test_histogram_has_cumulative_buckets_sum_and_count() -> None:
    declared = metric(kind="histogram")
    found = samples(declared, {"host_x": Distribution((0.5, 1.0), (2, 0, 1), 4.5)})
    assert {(name, labels.get("le"), value) for name, labels, value in found} == {
        ("paceline_host_x_bucket", "0.5", 2.0),
        ("paceline_host_x_bucket", "1.0", 2.0),
        ("paceline_host_x_bucket", "+Inf", 3.0),
        ("paceline_host_x_sum", None, 4.5),
        ("paceline_host_x_count", None, 3.0),
    }
