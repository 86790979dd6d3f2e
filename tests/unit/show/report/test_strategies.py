"""What the report says of node-local strategies, in tables and in words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.show.report import strategies
from paceline.show.report.figures.speed import local_global_chart, local_use_chart
from paceline.show.report.section import Detail, Section


def _parts(section: Section | None) -> Any:
    return section.parts


def _cells(table: Any) -> list[Any]:
    return [cells for _, cells in table.lines(Detail.PAGE)]


def _under(way: Any, launcher: str, **changes: object) -> Any:
    return dataclasses.replace(way, launcher=launcher, **changes)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    ways = [*fabricate.LOCAL_WAYS, *(_under(w, "mpi") for w in fabricate.LOCAL_WAYS)]
    return compare_run(fabricate.make_run(tmp_path, ways, repeats=3, jitter=0.01))


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


def test_figures_of_several_arithmetics_have_their_own_titles(comparison: Comparison) -> None:
    (found,) = comparison.local_global
    title = "Speedup alone and under other launchers, tiny"
    assert local_global_chart(comparison, found).title == title
    both = (found, dataclasses.replace(found, precision="bf16"))
    several = dataclasses.replace(comparison, local_global=both)
    titles = [local_global_chart(several, each).title for each in both]
    assert titles == [f"{title} (fp32, contiguous)", f"{title} (bf16, contiguous)"]


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


def test_the_fastest_everywhere_is_said_to_be(comparison: Comparison) -> None:
    (part,) = _parts(strategies.local_global_section(comparison))
    assert part.table.columns[2].heading == "under mpi:\nspeedup"
    assert part.sentences[0].startswith(
        "The strategy that is fastest alone, processes 2\u00d71, is also the fastest under mpi. "
        "Spearman's rank correlation of the speedups is "
    )
    assert part.sentences[0].endswith("(n = 6 strategies, p = 0.0028, permutation test).")


def test_another_fastest_and_few_strategies_are_said(tmp_path: Path) -> None:
    local = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.PROCESSES]
    slow = _under(fabricate.PROCESSES, "spark", transfer_s=0.9)
    spark = [_under(fabricate.SEQUENTIAL, "spark"), _under(fabricate.INTRAOP, "spark"), slow]
    run = fabricate.make_run(tmp_path, [*local, *spark], repeats=2)
    (part,) = _parts(strategies.local_global_section(compare_run(run)))
    # processes, intraop, sequential alone; intraop, sequential, processes under spark
    (sentence,) = part.sentences
    assert sentence == (
        "The strategy that is fastest alone, processes 2\u00d71, is not the fastest under spark: "
        "there it is intraop 1\u00d72. Spearman's rank correlation of the speedups is "
        "\N{MINUS SIGN}0.50 (n = 3 strategies, p = 1, permutation test), which is not significant."
    )


def test_a_tie_is_not_decided(tmp_path: Path) -> None:
    twin = dataclasses.replace(
        fabricate.PROCESSES,
        local_strategy="threads",
        transport="none",
        ranks=1,
        threads=2,
        thread_replicas=2,
    )
    ways = [fabricate.PROCESSES, twin]
    ways = [fabricate.SEQUENTIAL, *ways, *(_under(w, "mpi", nodes=2) for w in ways)]
    run = fabricate.make_run(tmp_path, ways, repeats=3, jitter=0.05)
    (part,) = _parts(strategies.local_global_section(compare_run(run)))
    (sentence,) = part.sentences
    assert "under mpi on 2 nodes" in sentence
    assert "but it is not separated alone from" in sentence
    assert "the difference may be chance" in sentence
    assert sentence.endswith("2 strategies are too few to compare their order.")
