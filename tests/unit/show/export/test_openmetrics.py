"""What a recorded run becomes for Prometheus."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.unit.analysis.fabricate import LAUNCHED, edit_json, make_run
from tests.unit.show.monitor.recorded import MPI, SEQUENTIAL, TWO_HOSTS, make_recorded_run

from paceline.base.errors import DataError
from paceline.measure.records.files import JsonlWriter, read_jsonl, write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.metrics import METRICS
from paceline.show.export.openmetrics import Written, write_openmetrics
from paceline.show.export.run_data import RunData

SERIES = {
    name: {*metric.scope.labels, *metric.labels, *metric.info_labels}
    for metric in METRICS
    for name in metric.series
}


def imported(run: RunFiles, tmp_path: Path) -> tuple[Written, list[tuple[str, float, float]]]:
    """What was said of it, and (series with labels, value, time) of each line."""
    out = tmp_path / "out.om"
    found = write_openmetrics(run, out)
    lines = out.read_text().splitlines()
    assert lines.pop() == "# EOF"
    parts = [line.rpartition("} ") for line in lines]
    values = [(name, rest.split()) for name, _, rest in parts]
    return found, [(f"{name}}}", float(value), float(at)) for name, (value, at) in values]


def course(values: list[tuple[str, float, float]], *words: str) -> list[tuple[float, float]]:
    """(time, value) of the series whose text has all of `words`."""
    return [(at, value) for name, value, at in values if all(word in name for word in words)]


def test_series_are_those_that_are_declared_with_their_labels_in_order_of_time(tmp_path) -> None:
    run = make_recorded_run(tmp_path / "run", (MPI, TWO_HOSTS))
    found, values = imported(run, tmp_path)
    assert found.trials == 2
    last: dict[str, float] = {}
    for name, _, at in values:
        series, _, labels = name.rstrip("}").partition("{")
        names = {label.split("=")[0] for label in labels.split('",')}
        assert names - {"le"} == SERIES[series]
        assert at > last.get(name, -math.inf), name
        last[name] = at
    marks = sum(math.isnan(value) for _, value, _ in values)
    assert found.samples == len(values) - marks
    written = {name.partition("{")[0] for name, _, _ in values}
    assert {name for metric in METRICS for name in metric.series} - written == set()


def test_values_are_those_of_the_rows_at_their_times(tmp_path) -> None:
    run = make_recorded_run(tmp_path / "run", (SEQUENTIAL,))
    [(_, files)] = run.trials()
    rows = [row for row in read_jsonl(files.host("node0").trace) if "unix_s" in row]
    _, values = imported(run, tmp_path)
    idle = course(values, "paceline_host_cpu_seconds_total", 'mode="idle"')
    assert idle == [(row["unix_s"], row["cpu_seconds"]["idle"]) for row in rows]
    start = course(values, "paceline_run_start_timestamp_seconds")
    assert start[0] == (rows[0]["unix_s"], LAUNCHED)


def test_run_and_version_are_those_that_a_scrape_told(tmp_path) -> None:
    run = make_recorded_run(tmp_path / "run", (SEQUENTIAL,))
    [(_, files)] = run.trials()
    trace = files.host("node0").trace
    header, *rows = read_jsonl(trace)
    _, values = imported(run, tmp_path)
    assert course(values, "paceline_run_info", 'run="run"')
    assert course(values, "paceline_sidecar_info", 'version="0.1.0"')

    def with_header(header: dict[str, object]) -> list[tuple[str, float, float]]:
        trace.unlink()
        with JsonlWriter(trace) as writer:
            writer.write_all([header, *rows])
        return imported(run, tmp_path)[1]

    values = with_header({**header, "run": "run-3fa2b1", "version": "7.7"})
    assert course(values, "paceline_run_info", 'run="run-3fa2b1"')
    assert not course(values, 'run="run"')
    assert course(values, "paceline_sidecar_info", 'version="7.7"')
    del header["version"]  # before it was written
    assert not course(with_header(header), "paceline_sidecar_info")


def test_training_has_come_as_far_as_the_steps_that_ended_by_then(tmp_path) -> None:
    run = make_recorded_run(tmp_path / "run", (SEQUENTIAL,))
    [(_, files)] = run.trials()
    ends = [r["started_unix_s"] + r["step_s"] for r in read_jsonl(files.rank(0).steps)]
    _, values = imported(run, tmp_path)
    for at, steps in course(values, "paceline_training_steps_total"):
        assert steps == sum(end <= at for end in ends)


@pytest.mark.parametrize("running", [False, True])
def test_gauges_and_facts_get_an_end_and_counters_none(tmp_path, running) -> None:
    run = make_recorded_run(tmp_path / "run", (MPI,))
    [(_, files)] = run.trials()
    if running:
        files.outcome.unlink()
    _, values = imported(run, tmp_path)
    ended = {name.partition("{")[0] for name, value, _ in values if math.isnan(value)}
    expected = {
        series for metric in METRICS for series in metric.series if metric.kind in {"gauge", "info"}
    }
    assert ended == expected
    marks = {at for _, value, at in values if math.isnan(value)}
    last = max(at for _, value, at in values if not math.isnan(value))
    assert sorted(marks) == pytest.approx([last + 0.001])


def test_other_hosts_times_are_on_rank_0s_clock(tmp_path) -> None:
    run = make_recorded_run(tmp_path / "run", (TWO_HOSTS,))
    [(_, files)] = run.trials()
    edit_json(files.rank(1).environment, clock_offset_s=-2.5)
    own = next(r for r in read_jsonl(files.host("node1").trace) if "unix_s" in r)["unix_s"]
    _, values = imported(run, tmp_path)
    [(first, _), *_] = course(values, "paceline_run_threads", 'host="node1"')
    assert first == own - 2.5
    [(first, _), *_] = course(values, "paceline_run_threads", 'host="node0"')
    assert first == own


def test_failed_rank_shows_at_its_last_sign_of_life(tmp_path) -> None:
    _, values = imported(make_recorded_run(tmp_path / "run", (TWO_HOSTS,)), tmp_path)
    failed = [v for _, v in course(values, "paceline_rank_failed", 'rank="1"')][:-1]
    assert failed[0] == 0
    assert failed[-1] == 1
    assert {v for _, v in course(values, "paceline_rank_failed", 'rank="0"')[:-1]} == {0}


@pytest.mark.parametrize("restarts", [0, 1])
def test_restart_counts_from_the_end_of_its_gap(tmp_path, restarts) -> None:
    run = make_recorded_run(tmp_path / "run", (SEQUENTIAL,))
    [(_, files)] = run.trials()
    trace = files.host("node0").trace
    rows = list(read_jsonl(trace))
    ended = rows[9]["unix_s"]
    trace.unlink()
    with JsonlWriter(trace) as out:
        out.write_all([*rows[:6], *rows[9:]])
    write_json(files.host("node0").sidecar, {"restarts": restarts})
    _, values = imported(run, tmp_path)
    counted = course(values, "paceline_sidecar_restarts_total")
    assert {value for at, value in counted if at < ended} == {0}
    assert {value for at, value in counted if at >= ended} == {restarts}


def test_row_before_the_one_before_it_is_left_out(tmp_path) -> None:
    run = make_recorded_run(tmp_path / "run", (SEQUENTIAL,))
    [(_, files)] = run.trials()
    trace = files.host("node0").trace
    rows = trace.read_text().splitlines()
    trace.write_text("\n".join([*rows[:6], rows[3], *rows[6:]]) + "\n")
    _, values = imported(run, tmp_path)
    times = [at for at, _ in course(values, "paceline_run_threads")]
    assert times == sorted(set(times))


def test_trials_come_in_order_of_time_and_damaged_ones_are_named(tmp_path) -> None:
    run = make_recorded_run(tmp_path / "run", (SEQUENTIAL, MPI, TWO_HOSTS))
    damaged = next(files for name, files in run.trials() if ".none." in name)
    damaged.outcome.write_text("{")
    found, values = imported(run, tmp_path)
    assert found.trials == 2
    [left_out] = found.left_out
    assert "outcome.json" in left_out
    times = [at for at, _ in course(values, "paceline_run_info", 'host="node0"')]
    assert times == sorted(times)


def test_run_without_trials_is_an_empty_document(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    assert imported(make_run(tmp_path / "run", ()), tmp_path) == (Written(0, 0), [])


def test_format_writes_all_trials_or_one_and_refuses_damaged_ones(tmp_path) -> None:
    run = make_recorded_run(tmp_path / "run", (SEQUENTIAL, MPI))
    [first, second] = [name for name, _ in run.trials()]
    [every] = RunData(run).export("openmetrics", tmp_path / "out")
    [one] = RunData(run).export("openmetrics", tmp_path / "out", first)
    assert (every.name, one.name) == ("run.om", f"{first}.om")
    assert f'trial="{second}"' in every.read_text()
    assert f'trial="{second}"' not in one.read_text()
    run.trial(second).outcome.write_text("{")
    with pytest.raises(DataError, match="outcome"):
        RunData(run).export("openmetrics", tmp_path / "out")
