"""How a dashboard's JSON is read, and its queries and names are filled in."""

from __future__ import annotations

import pytest
from monitoring.pictures.__main__ import BOARDS
from monitoring.pictures.board import (
    Threshold,
    Window,
    colour_at,
    filled,
    legend,
    read_board,
)
from monitoring.pictures.units import scaled

WINDOW = Window(run="quick.start", start_unix_s=1000.0, end_unix_s=1100.4, step_s=1)
STEPS = (Threshold(None, "green"), Threshold(0.3, "orange"), Threshold(0.6, "red"))


def test_variables_are_filled_in_as_grafana_does() -> None:
    expr = 'avg_over_time((rate(x{run=~"$run",host=~"$host"}[$__rate_interval]))[$__range:1s])'
    assert filled(expr, WINDOW) == (
        'avg_over_time((rate(x{run=~"quick\\\\.start",host=~".*"}[4s]))[100s:1s])'
    )
    assert filled("[$__range:$__interval]", WINDOW) == "[100s:1s]"


def test_rate_interval_grows_with_the_step() -> None:
    wide = Window(run="r", start_unix_s=0, end_unix_s=9000, step_s=30)
    assert filled("[$__rate_interval]", wide) == "[31s]"


@pytest.mark.parametrize("expr", ["$runs", "x[$__rate]", "$strategy"])
def test_unknown_variable_is_refused(expr) -> None:
    with pytest.raises(ValueError, match="is not known"):
        filled(expr, WINDOW)


def test_legend_says_labels_and_keeps_the_name_of_one_that_is_missing() -> None:
    assert legend("rank {{rank}} on {{ host }}", {"rank": "3", "host": "a"}) == "rank 3 on a"
    assert legend("{{host}}, {{run}}", {"host": "a"}) == "a, run"


@pytest.mark.parametrize(
    ("value", "colour"), [(-1, "green"), (0.29, "green"), (0.3, "orange"), (7, "red")]
)
def test_colour_is_that_of_the_highest_threshold_reached(value, colour) -> None:
    assert colour_at(value, STEPS) == colour


@pytest.mark.parametrize("name", ["run", "compare", "cluster"])
def test_all_of_a_committed_dashboard_is_understood(name) -> None:
    board = read_board(BOARDS / f"{name}.json")
    assert len(board.rows) > 3
    for panel in (panel for row in board.rows for panel in row.panels):
        assert panel.kind in ("timeseries", "stat", "bargauge", "table")
        for unit in (panel.unit, *panel.columns.units.values()):
            assert scaled(1.0, unit)
        for target in panel.targets:
            assert "$" not in filled(target.expr, WINDOW)
    for mark in board.marks:
        assert filled(mark.expr, WINDOW)


def test_closed_row_keeps_its_panels() -> None:
    [gpus] = [row for row in read_board(BOARDS / "cluster.json").rows if row.closed]
    assert [panel.title for panel in gpus.panels][:2] == ["Utilisation", "Memory"]


def test_epochs_are_marked_where_one_run_is_shown_and_off_elsewhere() -> None:
    on = {
        name: {mark.name for mark in read_board(BOARDS / f"{name}.json").marks if mark.on}
        for name in ("run", "compare", "cluster")
    }
    assert on["run"] == {"Trial start", "Epoch", "Failure"}
    assert on["compare"] == on["cluster"] == {"Trial start", "Failure"}
