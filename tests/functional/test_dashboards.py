"""The dashboards: as generated, complete, and every query of theirs answered by a real Prometheus
that holds a run. Grafana itself is not run here."""

from __future__ import annotations

import itertools
from pathlib import Path

import jsonschema
import pytest
from tests.functional.dashboards import DOCUMENTS, FOLDER, NAMES, panels, queries, query
from tests.functional.monitored import needs_prometheus
from tests.functional.prometheus_api import Prometheus, fill_in, numbers
from tests.functional.promql import faults, series_in
from tests.unit.analysis.fabricate import LAUNCHED
from tests.unit.show.monitor.recorded import CPU, SENT

from paceline.measure.records.metrics import METRICS
from paceline.show.monitor import serve

BEGAN, ENDED = LAUNCHED, LAUNCHED + 3030  # of the recorded run; its trials lie 1000 s apart
TWO_HOSTS = LAUNCHED + 3015  # while the last trial trains, on two hosts

# What of Grafana's classic schema these dashboards use (kinds/dashboard/dashboard_kind.cue in
# Grafana's sources, schemaVersion 36 and later).
_TARGET = {
    "type": "object",
    "required": ["expr", "refId", "legendFormat", "datasource"],
    "properties": {
        "expr": {"type": "string", "minLength": 1},
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "legendFormat": {"type": "string", "minLength": 1},
        "instant": {"type": "boolean"},
        "range": {"type": "boolean"},
        "format": {"enum": ["time_series", "table", "heatmap"]},
    },
}
_PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["row", "timeseries", "stat", "bargauge", "table"]},
        "title": {"type": "string", "minLength": 1},
        "gridPos": {
            "type": "object",
            "required": ["x", "y", "w", "h"],
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 23},
                "y": {"type": "integer", "minimum": 0},
                "w": {"type": "integer", "minimum": 1, "maximum": 24},
                "h": {"type": "integer", "minimum": 1},
            },
        },
        "targets": {"type": "array", "minItems": 1, "items": _TARGET},
    },
    "if": {"properties": {"type": {"const": "row"}}},
    "then": {"required": ["panels", "collapsed"]},
    "else": {"required": ["targets", "description", "fieldConfig", "datasource"]},
}
SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "annotations", "links"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "editable": {"const": False},
        "panels": {"type": "array", "items": _PANEL},
        "templating": {
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "type", "label"],
                        "properties": {"type": {"enum": ["query", "datasource"]}},
                    },
                }
            }
        },
        "annotations": {
            "properties": {
                "list": {
                    "type": "array",
                    "items": {"required": ["name", "datasource", "enable", "expr", "iconColor"]},
                }
            }
        },
    },
}


def all_annotations() -> list[dict]:
    return [a for document in DOCUMENTS.values() for a in document["annotations"]["list"]]


def test_committed_dashboards_are_what_the_generator_writes() -> None:
    from monitoring.dashboards.__main__ import documents

    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert written == documents(), "python -m monitoring.dashboards"


def test_package_has_the_same_dashboards() -> None:
    packaged = Path(serve.__file__).parent / "files"
    assert (packaged / "dashboards").resolve() == FOLDER
    assert (packaged / "provisioning").resolve() == FOLDER.parent / "provisioning"


@pytest.mark.parametrize("name", NAMES)
def test_dashboard_keeps_to_grafanas_schema(name) -> None:
    jsonschema.validate(DOCUMENTS[name], SCHEMA)


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_has_unit_legend_description_and_thresholds(name) -> None:
    for panel in panels(name):
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        assert defaults["thresholds"]["steps"], panel["title"]
        assert len(panel["description"]) > 8, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"], panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_ids_of_their_own_and_do_not_overlap(name) -> None:
    shown = [*DOCUMENTS[name]["panels"], *panels(name)]
    ids = {id(panel): panel["id"] for panel in shown}
    assert len(set(ids.values())) == len(ids)
    places = [panel["gridPos"] for panel in DOCUMENTS[name]["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


@pytest.mark.parametrize("name", NAMES)
def test_dashboard_has_variables_links_to_the_others_and_annotations(name) -> None:
    document = DOCUMENTS[name]
    assert [v["name"] for v in document["templating"]["list"]] == [
        "datasource",
        "run",
        "host",
        "rank",
    ]
    others = {DOCUMENTS[other]["uid"] for other in NAMES if other != name}
    assert {link["url"] for link in document["links"]} == {f"/d/{uid}" for uid in others}
    assert all(link["includeVars"] and link["keepTime"] for link in document["links"])
    assert [a["name"] for a in document["annotations"]["list"]] == [
        "Trial start",
        "Epoch",
        "Failure",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_queries_ask_for_metrics_and_labels_that_sidecars_have(name) -> None:
    asked = [target["expr"] for panel in panels(name) for target in panel["targets"]]
    asked += [a["expr"] for a in DOCUMENTS[name]["annotations"]["list"]]
    for expr in asked:
        assert series_in(expr), expr
        assert faults(expr) == []


def test_wrong_metrics_and_labels_would_be_noticed() -> None:
    assert faults("rate(paceline_host_cpu_second_total[4s])")
    assert faults('paceline_run_threads{rank="0"}')
    assert faults("sum by (trial) (paceline_run_threads)")
    assert faults('sum by (host) (rate(paceline_host_cpu_seconds_total{mode="idle"}[4s]))') == []


@pytest.mark.parametrize("name", NAMES)
def test_counters_stand_under_rate_and_with_the_scrape_intervals_window(name) -> None:
    for panel in panels(name):
        for target in panel["targets"]:
            for series in series_in(target["expr"]):
                if series.endswith("_total") and series != "paceline_sidecar_restarts_total":
                    assert f"rate({series}" in target["expr"], target["expr"]
                    # counted now and then: within a scrape's window they would be nought or huge
                    window = "2m" if "context_switches" in series else "$__rate_interval"
                    assert f"[{window}]" in target["expr"], target["expr"]
            assert "[30s]" not in target["expr"]


@pytest.mark.parametrize("name", NAMES)
def test_units_are_written_as_grafana_reads_them(name) -> None:
    """It puts a space before a suffix itself."""
    units = [panel["fieldConfig"]["defaults"]["unit"] for panel in panels(name)]
    assert not [unit for unit in units if unit.partition(":")[2].startswith(" ")]


def test_a_closed_rows_panels_say_what_is_missing() -> None:
    closed = [row for row in DOCUMENTS["cluster"]["panels"] if row.get("collapsed")]
    said = {p["fieldConfig"]["defaults"]["noValue"] for row in closed for p in row["panels"]}
    assert said == {"no data: no GPU is seen"}


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {series for _, _, target in queries() for series in series_in(target["expr"])}
    shown |= {series for a in all_annotations() for series in series_in(a["expr"])}
    missing = {m.name for m in METRICS if not shown & set(m.series)}
    assert missing == set()


@pytest.fixture
def api(recorded_api: Prometheus):
    return recorded_api


@needs_prometheus
@pytest.mark.parametrize(
    ("kind", "target"),
    [(kind, target) for _, kind, target in queries()],
    ids=[name for name, _, _ in queries()],
)
def test_prometheus_answers_the_query_of_a_panel_with_data(api, kind, target) -> None:
    expr = fill_in(target["expr"], run="recorded", range_s=round(ENDED - BEGAN))
    if target.get("instant"):
        answer = api.instant(expr, TWO_HOSTS)
    else:
        answer = api.over(expr, TWO_HOSTS - 10, TWO_HOSTS + 5)
    assert numbers(answer), expr


@needs_prometheus
@pytest.mark.parametrize("annotation", DOCUMENTS["run"]["annotations"]["list"], ids=str)
def test_prometheus_answers_the_query_of_an_annotation(api, annotation) -> None:
    expr = fill_in(annotation["expr"], run="recorded", range_s=1)
    assert numbers(api.over(expr, BEGAN, ENDED)), expr


@needs_prometheus
def test_prometheus_answers_the_variables(api) -> None:
    assert api.get("label/run/values", **{"match[]": "paceline_run_info"}) == ["recorded"]
    assert api.get("label/rank/values", **{"match[]": "paceline_training_steps_total"}) == [
        "0",
        "1",
    ]


def _query(name: str, title: str, legend: str) -> str:
    return fill_in(query(name, title, legend), run="recorded", range_s=round(ENDED - BEGAN))


@needs_prometheus
@pytest.mark.parametrize(
    ("name", "title", "legend", "expected"),
    [
        ("run", "CPU idle", "idle", CPU["idle"] / 2),
        ("run", "IOWait", "IOWait", CPU["iowait"] / 2),
        ("cluster", "Stolen", "{{host}}", CPU["steal"] / 2),
        ("cluster", "Threads", "{{host}}, {{run}}", 7.0),  # one rank on each host
        ("cluster", "Threads", "cores, {{host}}", 2.0),
        ("run", "Sent", "{{device}} of {{host}}", SENT),
        # 0.01 + 0.1 + 0.25 + 0.02 + 0.005 s of rank 0, 0.15 s more of rank 1
        ("run", "Straggler", "rank {{rank}} on {{host}}", [0.385 / 0.535, 0.535 / 0.385]),
    ],
)
def test_panel_shows_what_was_put_into_the_run(api, name, title, legend, expected) -> None:
    # at a moment well within the trial, so that the window is full
    answer = api.instant(_query(name, title, legend), LAUNCHED + 3012)
    found = sorted(set(numbers(answer)))
    wanted = sorted(expected) if isinstance(expected, list) else [expected] * len(found)
    assert found == pytest.approx(wanted, rel=1e-3)


@needs_prometheus
def test_throughput_in_compare_is_that_of_the_steps(api) -> None:
    answer = api.instant(_query("compare", "Trials", "Samples/s"), ENDED)
    found = {each["metric"]["trial"]: float(each["value"][1]) for each in answer}
    # eight images a step of so many seconds
    assert found == pytest.approx(
        {
            "tiny.local.none.sequential.n1r1t1.fp32.r0": 8 / 0.635,
            "tiny.mpi.mpi.processes.n1r2t1.fp32.r0": 8 / 0.345,
            "tiny.spark.gloo.processes.n1r2t1.fp32.r0": 8 / 0.41,
            "tiny.mpi.mpi.processes.n2r1t1.fp32.r0": 8 / 0.545,
        },
        rel=1e-3,
    )


@needs_prometheus
@pytest.mark.parametrize(
    ("title", "expected", "tolerance"),
    [
        ("IOWait", CPU["iowait"] / 2, 1e-3),
        ("CPU idle", CPU["idle"] / 2, 1e-3),
        ("RAM", 0.25, 0.06),  # less before the first step, which some moments touch
    ],
)
def test_bars_by_local_strategy_are_means_of_the_trials(api, title, expected, tolerance) -> None:
    answer = api.instant(
        _query("compare", f"{title} by local strategy", "{{local_strategy}}"), ENDED
    )
    found = {each["metric"]["local_strategy"]: float(each["value"][1]) for each in answer}
    wanted = {"sequential": expected, "processes": expected}
    assert found == pytest.approx(wanted, rel=tolerance)


@needs_prometheus
def test_speedups_in_compare_are_over_the_sequential_baseline(api) -> None:
    title = "Speedup on one node and on several"
    legend = "{{workload}} · {{local_strategy}} · {{launcher}} · {{transport}} · nodes {{nodes}}"
    answer = api.instant(_query("compare", title, legend), ENDED)
    found = {
        (each["metric"]["launcher"], each["metric"]["nodes"]): float(each["value"][1])
        for each in answer
    }
    assert found == pytest.approx(
        {
            ("local", "1"): 1.0,
            ("mpi", "1"): 0.635 / 0.345,
            ("spark", "1"): 0.635 / 0.41,
            ("mpi", "2"): 0.635 / 0.545,
        },
        rel=1e-3,
    )
