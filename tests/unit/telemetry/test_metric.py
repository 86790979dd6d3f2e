"""One declaration gives the trace column, the series, the row of the docs page and the unit on
dashboards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.spec import TelemetrySettings
from paceline.telemetry.exporter import text_of
from paceline.telemetry.metrics import HOST, METRICS, RANK
from paceline.telemetry.metrics.docs_page import tables
from paceline.telemetry.metrics.metric import (
    Distribution,
    Metric,
    Sample,
    as_lists,
    read_into,
    samples_of,
)
from paceline.telemetry.request import SidecarRequest
from paceline.telemetry.sampler import Sampler

ANSWER = Metric(
    name="host_answer_bytes",
    kind="counter",
    scope=HOST,
    help="A throw-away metric.",
    read=lambda host: {"deep thought": 42},
    column="answers.{computer}.bytes",
)


def test_new_metric_is_in_trace_exposition_and_docs_with_its_declaration_alone(
    tmp_path: Path,
) -> None:
    metrics = (*METRICS, ANSWER)
    request = SidecarRequest(
        settings=TelemetrySettings(listen_port=-1), run="r", trace=tmp_path / "trace.jsonl"
    )
    sampler = Sampler(request, "node-1", metrics)
    snapshot = sampler.tick()
    sampler.close()
    row = json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[1])
    assert row["answers"] == {"deep thought": {"bytes": 42}}
    series = 'paceline_host_answer_bytes_total{computer="deep thought",host="node-1"} 42.0'
    assert series in text_of(metrics, snapshot)
    assert (
        "| `paceline_host_answer_bytes_total` | counter | bytes | `computer` | "
        "`answers.{computer}.bytes` | A throw-away metric. |"
    ) in tables(metrics)
    assert (ANSWER.grafana_unit(), ANSWER.grafana_unit(rate=True)) == ("bytes", "Bps")


def metric(**changes: object) -> Metric:
    declared = {
        "name": "host_x",
        "kind": "gauge",
        "scope": HOST,
        "help": "A metric.",
        "read": lambda reading: reading.x,
    }
    return Metric(**{**declared, **changes})  # type: ignore[arg-type]


def read(declared: Metric, x: object) -> dict[str, object]:
    row: dict[str, object] = {}
    read_into(row, [declared], SimpleNamespace(x=x))
    return row


def samples(declared: Metric, row: dict[str, object]) -> list[Sample]:
    return list(samples_of(declared, {"host": "h"}, row))


def test_plain_value_is_a_column_and_a_series() -> None:
    row = read(metric(), 5)
    assert row == {"host_x": 5}
    assert samples(metric(), row) == [Sample("paceline_host_x", {"host": "h"}, 5.0)]


def test_value_that_was_not_measured_is_null_and_no_series() -> None:
    row = read(metric(), None)
    assert row == {"host_x": None}
    assert samples(metric(), row) == []


def test_label_may_be_part_of_a_columns_name() -> None:
    declared = metric(column="{kind}_faults", kind="counter")
    row = read(declared, {"minor": 1, "major": 2})
    assert row == {"minor_faults": 1, "major_faults": 2}
    assert samples(declared, row) == [
        Sample("paceline_host_x_total", {"host": "h", "kind": "minor"}, 1.0),
        Sample("paceline_host_x_total", {"host": "h", "kind": "major"}, 2.0),
    ]


def test_metrics_with_one_label_share_a_column() -> None:
    used = metric(name="a", column="gpus.{gpu}.used")
    size = metric(name="b", column="gpus.{gpu}.size")
    row: dict[str, object] = {}
    read_into(row, [used, size], SimpleNamespace(x={"0": 1, "1": None}))
    assert as_lists(row) == {"gpus": [{"used": 1, "size": 1}]}
    assert samples(size, as_lists(row)) == [
        Sample("paceline_b", {"host": "h", "gpu": "0"}, 1.0),
    ]


@pytest.mark.parametrize("name", ["{x}", "a.b", "line\nbreak", 'quo"te'])
def test_label_values_may_hold_anything(name: str) -> None:
    declared = metric(column="sensors.{sensor}")
    row = read(declared, {name: 1})
    assert samples(declared, row) == [Sample("paceline_host_x", {"host": "h", "sensor": name}, 1.0)]


def test_numbered_labels_become_a_list_in_the_trace() -> None:
    declared = metric(column="cores.{core}")
    row = as_lists(read(declared, {"0": 1.5, "1": 2.5}))
    assert row == {"cores": [1.5, 2.5]}
    assert [sample.labels["core"] for sample in samples(declared, row)] == ["0", "1"]


def test_info_metric_reports_facts_as_labels() -> None:
    facts = metric(kind="info", info_labels=("a", "b"))
    assert samples(facts, read(facts, {"a": "1", "b": "2"})) == [
        Sample("paceline_host_x_info", {"host": "h", "a": "1", "b": "2"}, 1.0)
    ]
    one = metric(kind="info", info_labels=("name",), column="g.{gpu}.name")
    assert samples(one, read(one, {"0": "H200"})) == [
        Sample("paceline_host_x_info", {"host": "h", "gpu": "0", "name": "H200"}, 1.0)
    ]


def test_histogram_has_cumulative_buckets_sum_and_count() -> None:
    declared = metric(kind="histogram", scope=RANK)
    found = samples(declared, read(declared, Distribution((0.5, 1.0), (2, 0, 1), 4.5)))
    assert [(s.name, s.labels.get("le"), s.value) for s in found] == [
        ("paceline_host_x_bucket", "0.5", 2.0),
        ("paceline_host_x_bucket", "1.0", 2.0),
        ("paceline_host_x_bucket", "+Inf", 3.0),
        ("paceline_host_x_sum", None, 4.5),
        ("paceline_host_x_count", None, 3.0),
    ]
