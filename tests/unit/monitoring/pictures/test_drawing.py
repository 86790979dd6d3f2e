"""Panels as they are drawn: tables, legends, figures, bars, gaps."""

from __future__ import annotations

import dataclasses
import json

from monitoring.pictures.answers import Answer
from monitoring.pictures.board import Columns, Panel, Target, Threshold, Window
from monitoring.pictures.curves import MarkedTime, with_gaps
from monitoring.pictures.drawing import Place, drawn
from monitoring.pictures.source import Series
from monitoring.pictures.tables import merged

WINDOW = Window(run="r", start_unix_s=0.0, end_unix_s=60.0, step_s=1)
PLACE = Place(left_px=0, top_px=0, width_px=424, height_px=344)
PANEL = Panel(
    kind="timeseries",
    title="CPU idle",
    description="Share of time.",
    unit="percentunit",
    decimals=None,
    low=0,
    high=1,
    no_value="no data: none here",
    thresholds=(Threshold(None, "green"), Threshold(0.6, "red")),
    threshold_lines=True,
    stacked=False,
    x=0,
    y=0,
    width=8,
    height=8,
    targets=(Target("A", "x", "{{host}}", False),),
    columns=Columns(order={}, headings={}, hidden=frozenset(), units={}, decimals={}, widths_px={}),
)


def series(*values: float, **labels: str) -> Series:
    return Series(labels, tuple(float(n) for n in range(len(values))), values)


def answered(*named: tuple[str, Series]) -> Answer:
    return Answer({"A": [found for _, found in named]}, named)


def figure_of(shown: dict) -> dict:
    return json.loads(shown["plot"])


def test_curves_have_mean_and_maximum_in_the_legend() -> None:
    shown = drawn(PANEL, answered(("a", series(0.1, 0.3)), ("b", series(0.5))), PLACE, [], WINDOW)
    [entries] = shown["legends"]
    assert [(e["name"], e["mean"], e["most"]) for e in entries] == [
        ("a", "20%", "30%"),
        ("b", "50%", "50%"),
    ]
    assert len({e["colour"] for e in entries}) == 2


def test_names_that_have_no_room_are_counted() -> None:
    many = [(f"core {n}", series(0.1)) for n in range(64)]
    columns = drawn(PANEL, answered(*many), PLACE, [], WINDOW)["legends"]
    assert max(map(len, columns)) < 12
    names = [entry["name"] for entries in columns for entry in entries]
    assert names[-1] == f"and {64 - len(names) + 1} more"


def test_long_names_have_one_column_and_short_ones_two() -> None:
    short = [(f"{n}", series(0.1)) for n in range(4)]
    long = [(f"proportional, rank {n} on a host of ours", series(0.1)) for n in range(4)]
    assert len(drawn(PANEL, answered(*short), PLACE, [], WINDOW)["legends"]) == 2
    assert len(drawn(PANEL, answered(*long), PLACE, [], WINDOW)["legends"]) == 1


def test_nothing_answered_says_the_panels_own_words() -> None:
    shown = drawn(PANEL, answered(), PLACE, [], WINDOW)
    assert shown["nothing"] == "no data: none here"
    assert not shown["plot"]


def test_threshold_is_a_line_where_the_axis_reaches_it() -> None:
    shown = figure_of(drawn(PANEL, answered(("a", series(0.1))), PLACE, [], WINDOW))
    assert [s["y0"] for s in shown["layout"]["shapes"]] == [0.6]
    free = dataclasses.replace(PANEL, high=None)
    low = figure_of(drawn(free, answered(("a", series(0.1, 0.2))), PLACE, [], WINDOW))
    assert not low["layout"].get("shapes")


def test_start_is_a_line_and_what_lasts_is_shaded() -> None:
    marks = [MarkedTime("blue", 10, 14), MarkedTime("red", 30, 50)]
    plain = dataclasses.replace(PANEL, threshold_lines=False)
    shapes = figure_of(drawn(plain, answered(("a", series(0.1))), PLACE, marks, WINDOW))["layout"][
        "shapes"
    ]
    assert [(s["type"], s["x0"], s["x1"]) for s in shapes] == [
        ("line", 10_000, 10_000),
        ("line", 30_000, 30_000),
        ("rect", 30_000, 50_000),
    ]


def test_axis_of_stacked_curves_reaches_their_sum() -> None:
    stacked = dataclasses.replace(PANEL, stacked=True, high=None)
    named = answered(("a", series(0.5)), ("b", series(0.4)))
    assert figure_of(drawn(stacked, named, PLACE, [], WINDOW))["layout"]["yaxis"]["range"][1] > 0.9


def test_gap_is_not_drawn_across() -> None:
    broken = Series({}, (0.0, 1.0, 5.0), (1.0, 2.0, 3.0))
    assert with_gaps(broken, 1) == ([0.0, 1000.0, 2000.0, 5000.0], [1.0, 2.0, None, 3.0])


def test_figure_is_the_last_value_in_its_colour_and_fits_its_place() -> None:
    stat = dataclasses.replace(PANEL, kind="stat", unit="suffix:images/s")
    narrow = dataclasses.replace(PLACE, width_px=150)
    wide = drawn(stat, answered(("all", series(0.1, 700.0))), PLACE, [], WINDOW)["figure"]
    small = drawn(stat, answered(("all", series(0.1, 700.0))), narrow, [], WINDOW)["figure"]
    assert wide["text"] == small["text"] == "700 images/s"
    assert wide["colour"] == "#C4162A"
    assert small["size_px"] < wide["size_px"]


def test_bars_are_shares_of_the_largest_where_the_panel_has_no_maximum() -> None:
    gauge = dataclasses.replace(PANEL, kind="bargauge", high=None, unit="short")
    named = answered(("a", series(20.0)), ("b", series(5.0)))
    shown = drawn(gauge, named, PLACE, [], WINDOW)["bars"]["shown"]
    assert [(b["name"], b["percent"], b["value"]) for b in shown] == [
        ("a", 100, "20"),
        ("b", 25, "5"),
    ]


def test_table_puts_answers_together_by_the_labels_they_share() -> None:
    columns = Columns(
        order={"host": 0, "version": 1, "Value #A": 2, "Value #B": 3},
        headings={"host": "Host", "version": "Version", "Value #A": "Age", "Value #B": "Idle"},
        hidden=frozenset({"run"}),
        units={"Age": "s", "Idle": "percentunit"},
        decimals={"Idle": 1},
        widths_px={"Version": 200},
    )
    panel = dataclasses.replace(PANEL, kind="table", columns=columns)
    answers = {
        "A": [series(0.25, host="b", run="r"), series(0.5, host="a", run="r")],
        "B": [series(0.123, host="a", version="0.1.0")],
    }
    table = merged(panel, answers)
    assert table.headings == ("Host", "Version", "Age", "Idle")
    assert table.numbers == (False, False, True, True)
    assert table.widths_px == (None, 200, None, None)
    assert table.rows == (("a", "0.1.0", "500 ms", "12.3%"), ("b", "", "250 ms", ""))
