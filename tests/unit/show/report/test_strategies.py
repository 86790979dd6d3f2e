"""What the report says of node-local strategies, in tables and in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.show.report import strategies
from paceline.show.report.figures.speed import local_use_chart
from paceline.show.report.section import Detail, Section


def _parts(section: Section | None) -> Any:
    return section.parts


def _cells(table: Any) -> list[Any]:
    return [cells for _, cells in table.lines(Detail.PAGE)]


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return compare_run(fabricate.make_run(tmp_path, fabricate.LOCAL_WAYS))


def test_local_strategies_stand_in_a_table_of_their_own(comparison: Comparison) -> None:
    (part,) = _parts(strategies.local_section(comparison))
    shown = list(zip(part.table.shown(Detail.PAGE), *_cells(part.table), strict=True))
    by_heading = {column.heading: cells for column, *cells in shown}
    names = zip(by_heading["strategy"], by_heading["layout"], strict=True)
    assert {(strategy.text, layout.text) for strategy, layout in names} == {
        ("sequential", ""),
        ("intraop", "1\u00d72"),
        ("threads", "2\u00d71"),
        ("processes", "2\u00d71"),
        ("pipeline", "2\u00d71 m8"),
        ("hybrid", "2\u00b72\u00d71 m4"),
    }
    assert {cell.soft for cell in by_heading["peak\nMiB"]} == {"PSS", "RSS"}


def test_a_lone_local_trial_is_no_comparison(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    assert strategies.local_section(compare_run(run)) is None


def test_the_figure_over_time_has_each_strategy_three_times(comparison: Comparison) -> None:
    rows = [r for r in comparison.rows if r.setup.launcher == "local"]
    chart = local_use_chart(comparison, "tiny", rows)
    traces = json.loads(chart.json)["data"]
    assert len(traces) == 3 * 6
    # a small figure of its own for each, so that no lines lie on one another
    assert len({t["yaxis"] for t in traces}) == 3 * 6
    # names and titles stand above the figures, where a phone has room for them
    layout = json.loads(chart.json)["layout"]
    assert layout["margin"]["r"] < 50
    names = [note for note in layout["annotations"] if note["x"] == 0]
    assert len(names) == 6
    assert {note["textangle"] for note in names} == {0}


def test_without_traces_there_is_no_figure(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.THREADS])
    for _, files in run.trials():
        files.host("node0").trace.unlink()
    (part,) = _parts(strategies.local_section(compare_run(run)))
    assert not list(part.figures())


def test_stage_bars_hold_forward_backward_and_bubble(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.PIPELINE])
    (part,) = _parts(strategies.pipelines_section(compare_run(run)))
    ((_, chart),) = part.figures()
    bars = {t["name"]: dict(zip(t["y"], t["x"], strict=True)) for t in _data(chart.json)}
    name = "local · shared · pipeline 2\u00d71 m8"
    assert bars["forward"] == pytest.approx({f"{name}  stage 0": 0.105, f"{name}  stage 1": 0.095})
    assert bars["bubble"] == pytest.approx({f"{name}  stage 0": 0.05, f"{name}  stage 1": 0.06})
    ((_, cells),) = part.table.lines(Detail.PAGE)
    assert [cell.text for cell in cells[7:]] == ["features.2", "3.00", "3.00"]


def _data(chart: str) -> list[dict[str, Any]]:
    """Plotly may write arrays as base64; these are lists."""
    traces: list[dict[str, Any]] = json.loads(chart)["data"]
    return traces
