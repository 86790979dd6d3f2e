"""Figures of traces: what is in a trace has a figure, on rank 0's clock, with its gaps."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run
from paceline.analysis.trial.host_frames import read_series
from paceline.measure.records.layout import RunFiles
from paceline.show.report.document import render
from paceline.show.report.figures.hosts import telemetry_charts
from paceline.show.report.sections import sidecar_sentence

_STEP_S = 0.5  # of a fabricated trace


@pytest.fixture
def run(tmp_path) -> RunFiles:
    """A baseline, and two ranks on two hosts, whose clock is 100 s behind on the second."""
    ways = [
        fabricate.SEQUENTIAL,
        dataclasses.replace(fabricate.MPI, nodes=2, ranks=1, clock_offset_s=100.0),
    ]
    return fabricate.make_run(tmp_path / "run", ways)


def _trace_of(run: RunFiles, host: str) -> tuple[Any, list[dict[str, Any]]]:
    """The trace file of the two-host trial on `host`, with its rows."""
    ((_, files),) = [found for found in run.trials() if ".mpi." in found[0]]
    path = files.host(host).trace
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def _rewrite(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _enrich(run: RunFiles, host: str, *, offset_s: float = 0.0) -> None:
    path, (header, *samples) = _trace_of(run, host)
    ranks = []
    for number, row in enumerate(samples):
        row["unix_s"] -= offset_s
        row["core_busy_s"] = [0.0, 0.25 * number]
        row["pressure"] = {"cpu": {"some_s": 0.25 * number, "full_s": None}}
        row["disks"] = {"sda": {"read_bytes": 3_000_000 * number, "written_bytes": 0}}
        row["run_voluntary_context_switches"] = None if number % 4 else 25 * number
        ranks.append(
            {
                "unix_s": row["unix_s"],
                "rank": int(host[-1]),
                "pid": 7,
                "processes": 1,
                "cpu_seconds": 0.4 * number,
                "rss_bytes": 200 << 20,
                "pss_bytes": (100 << 20) if number % 2 == 0 else None,
                "threads": 3,
                "voluntary_context_switches": 0,
                "involuntary_context_switches": 0,
                "read_bytes": None,
                "written_bytes": None,
                "open_files": None,
            }
        )
    _rewrite(path, [header, *samples])
    _rewrite(path.with_name("ranks.jsonl"), ranks)


def _charts(run: RunFiles) -> dict[str, dict[str, Any]]:
    """The figures of the two-host trial by the first word of their titles."""
    comparison = compare_run(run)
    ((trial,),) = [found for name, found in comparison.trials.items() if ".mpi." in name]
    return {
        c.title.split(":")[0]: json.loads(c.json)
        for c in telemetry_charts(trial, read_series(trial.record.files))
    }


def _values(encoded: Any) -> np.ndarray:
    """Plotly's arrays: numbers in base64, or a plain list."""
    if isinstance(encoded, list):
        return np.array(encoded, dtype=np.float64)
    return np.frombuffer(base64.b64decode(encoded["bdata"]), dtype=encoded["dtype"])


def test_an_old_trace_has_figures_of_what_it_holds(run: RunFiles) -> None:
    assert list(_charts(run)) == ["Training", "All hosts on one clock", "Bytes moved"]


def test_a_full_trace_has_a_figure_of_each_kind(run: RunFiles) -> None:
    _enrich(run, "node0")
    _enrich(run, "node1", offset_s=100.0)
    charts = _charts(run)
    assert {
        "Each core",
        "CPU of each rank",
        "Memory of each rank (proportional",
        "Context switches of the run's threads",
        "Pressure",
    } < set(charts)
    names = [curve["name"] for curve in charts["CPU of each rank"]["data"]]
    assert names == ["rank 0", "rank 1"]
    memory = charts["Memory of each rank (proportional"]["data"][0]
    assert set(_values(memory["y"])) == {100.0}
    pressure = charts["Pressure"]["data"][0]
    assert pressure["name"] == "cpu on node0"
    assert _values(pressure["y"]) == pytest.approx(50.0)  # 0.25 s in each half second
    read = next(c for c in charts["Bytes moved"]["data"] if c["name"] == "disk read on node0")
    assert _values(read["y"]) == pytest.approx(6.0)
    switches = charts["Context switches of the run's threads"]["data"][0]
    assert _values(switches["y"]) == pytest.approx(50.0)  # 100 from reading to reading, 2 s
    cores = charts["Each core"]
    # numbers: Plotly.js fails on several heat maps with names of their own on one axis
    assert [heat["y"] for heat in cores["data"]] == [[0, 1], [2, 3]]
    named = [f"core {core} on node{node}" for node in (0, 1) for core in (0, 1)]
    assert cores["layout"]["yaxis"]["ticktext"] == named
    assert _values(cores["data"][0]["z"]).reshape(2, -1)[1] == pytest.approx(50.0)
    curves = {curve["name"]: curve for curve in charts["All hosts on one clock"]["data"]}
    first, second = (_values(curves[f"CPU on node{n}"]["x"]) for n in (0, 1))
    assert first[0] == pytest.approx(2 * _STEP_S)  # after the launch; the first row has no share
    assert second == pytest.approx(first, abs=1e-3)
    assert len({tuple(figure["layout"]["xaxis"]["range"]) for figure in charts.values()}) == 1


@pytest.mark.parametrize(("samples_known", "unit"), [(True, "samples"), (False, "steps")])
def test_speed_is_in_steps_where_samples_are_not_known(run, samples_known, unit) -> None:
    ((trial,),) = [t for name, t in compare_run(run).trials.items() if ".mpi." in name]
    steps = dataclasses.replace(trial.steps, samples_known=samples_known)
    hosts = read_series(trial.record.files)
    chart = telemetry_charts(dataclasses.replace(trial, steps=steps), hosts)[0]
    drawn = json.loads(chart.json)
    assert drawn["data"][0]["name"] == f"{unit}/s"
    assert drawn["layout"]["yaxis"]["title"]["text"] == f"{unit} per second"


def test_a_gap_is_shaded_and_no_line_crosses_it(run: RunFiles) -> None:
    path, rows = _trace_of(run, "node0")
    cut = len(rows) // 2
    before, after = rows[cut]["unix_s"], rows[cut + 3]["unix_s"]
    assert after - before == 3 * _STEP_S
    _rewrite(path, [*rows[: cut + 1], *rows[cut + 3 :]])
    figure = _charts(run)["All hosts on one clock"]
    shades = [s for s in figure["layout"]["shapes"] if s["fillcolor"] == "#B93C00"]
    assert [s["x1"] - s["x0"] for s in shades] == [pytest.approx(3 * _STEP_S)]
    curve = next(c for c in figure["data"] if c["name"] == "CPU on node0")
    inside = (_values(curve["x"]) > shades[0]["x0"]) & (_values(curve["x"]) < shades[0]["x1"])
    assert np.isnan(_values(curve["y"])[inside]).any()
    assert "no samples: the sidecar was not running" in render(compare_run(run))


def test_the_cost_of_the_sidecar_is_that_of_the_dearest_host(run: RunFiles) -> None:
    path, rows = _trace_of(run, "node1")
    for number, row in enumerate(rows[1:]):
        row |= {"sidecar_cpu_seconds": 0.01 * number, "sidecar_rss_bytes": 50 << 20}
        row["sidecar_missed_ticks"] = number // 10
    _rewrite(path, rows)
    sentence = sidecar_sentence(compare_run(run))
    # 0.01 s in each half second
    assert sentence.startswith("At most 2.0 % of one core and 50 MiB, on the host with the highest")
    assert "with a sample every 0.50 s. " in sentence
    assert f"It missed {(len(rows) - 2) // 10} of " in sentence
