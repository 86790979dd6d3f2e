"""The page stands alone, holds what was measured, and runs nothing that a file brought along."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from tests.support.pages import Page
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.values import Target
from paceline.show.report import document
from paceline.show.report.document import charts, render
from paceline.show.report.figures.charts import colours, rank_time_chart
from paceline.show.report.provenance import worst_checks
from paceline.show.report.section import Section
from paceline.show.report.table import comparison_text

_MIB = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """Read only."""
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.MPI, fabricate.SPARK]
    cases = [
        fabricate.Case(workload="complex-small", model="vgg16"),
        fabricate.Case(workload="simple-big", model="alexnet"),
    ]
    made: RunFiles = fabricate.make_run(
        tmp_path_factory.mktemp("document") / "run", ways, cases=cases, repeats=2, jitter=0.02
    )
    return made


@pytest.fixture(scope="module")
def comparison(run: RunFiles) -> Comparison:
    return compare_run(run)


@pytest.fixture(scope="module")
def page(comparison: Comparison) -> Page:
    """The report of `run`."""
    html = render(comparison)
    assert len(html.encode()) < 8 * _MIB
    return Page(html)


def test_the_page_needs_no_network(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in {"link", "iframe", "img"}
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")


def test_every_chart_has_its_data_and_its_place(page: Page) -> None:
    places = [n for n, (_, found) in enumerate(page.tags) if found.get("class") == "chart"]
    # 7 a workload, strategies over time; for each of 16 trials a pair, its speed, and its traffic
    assert len(places) == 2 * 8 + 4 * 16
    assert all(page.tags[n + 1] == ("script", {"type": "application/json"}) for n in places)
    for script in page.root.every("script")[: len(places)]:
        assert {"data", "layout"} <= set(json.loads(script.own_text))


def test_no_figure_is_lost_because_its_title_is_that_of_another(tmp_path) -> None:
    cases = [fabricate.Case(), fabricate.Case(workload="simple-big", model="alexnet")]
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    comparison = compare_run(
        fabricate.make_run(tmp_path, ways, cases=cases, repeats=3, jitter=0.01)
    )
    by_title = charts(comparison)
    assert sum("takes longer per step than" in title for title in by_title) == 2
    assert len(by_title) == render(comparison).count('<script type="application/json"')


def test_lossy_configurations_are_ranked_where_there_is_a_target(tmp_path) -> None:
    target = Target(metric="accuracy", at_least=0.6)
    case = fabricate.Case(evaluate_every_steps=2, target=target)
    lossy = dataclasses.replace(
        fabricate.MPI, transport="gloo", learned=1.0, compression={"method": "topk"}
    )
    run = fabricate.make_run(tmp_path / "run", [fabricate.SEQUENTIAL, lossy], cases=[case])
    assert any(row.equivalence.is_lossy and row.ranked for row in compare_run(run).rows)
    words = Page(render(compare_run(run))).words
    assert "They are ranked only by the time to a target." in words
    assert "Pale bars: equivalence was not shown." in words
    assert "and not ranked" not in words
    assert "are not ranked, because" not in words


def test_survived_failures_have_a_section_with_a_link(comparison, monkeypatch) -> None:
    made = Section(title="Failures and recovery", anchor="recovery")
    monkeypatch.setattr(document, "recovery_section", lambda _: made)
    page = Page(render(comparison))
    assert "recovery" in {a.get("id") for tag, a in page.tags if tag == "h2"}
    assert "#recovery" in {a.get("href") for tag, a in page.tags if tag == "a"}


def test_the_page_shows_what_ranks_had_and_what_was_run(page: Page) -> None:
    assert "OMP_NUM_THREADS=2" in page.words
    assert "paceline-fabricated --trial simple-big.mpi.mpi.processes.n1r2t1.fp32.r1 <&>" in (
        page.words
    )
    assert "Fabricated CPU @ 2.00GHz" in page.words
    assert "2.13.0" in page.words
    assert "data/simple-big" in page.words


def test_text_from_files_cannot_become_markup(run, tmp_path) -> None:
    run = RunFiles(shutil.copytree(run.root, tmp_path / "run"))
    evil = "</script><script>alert(1)</script><b>"
    for name, files in run.trials():
        files.command.write_text(evil)
        if ".spark." in name:
            fabricate.edit_json(files.outcome, status="failed", exit_code=5, message=evil)
        for _, rank in files.ranks():
            fabricate.edit_json(rank.environment, host=evil, cpu_model=evil)
    fabricate.edit_json(run.manifest, host={"name": evil}, spec_toml=evil)
    html = render(compare_run(run))
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_a_page_without_baseline_or_manifest_or_traces_still_stands(tmp_path) -> None:
    run = fabricate.make_run(tmp_path / "run", [fabricate.MPI])
    run.manifest.unlink()
    (files,) = (f for _, f in run.trials())
    files.host("node0").trace.unlink()
    files.command.unlink()
    page = Page(render(compare_run(run)))
    assert "No configuration is ranked, because no baseline finished." in page.words
    assert "This run has no traces." in page.words


def test_colours_are_the_same_in_every_workload(comparison: Comparison) -> None:
    chosen = colours(comparison)
    for configuration, colour in chosen.items():
        way = re.sub("^(complex-small|simple-big)", "simple-big", configuration)
        assert chosen[way] == colour
    assert len(set(chosen.values())) == 4


def test_stacked_bars_hold_every_ranks_phases(comparison: Comparison) -> None:
    chart = json.loads(rank_time_chart(comparison, "complex-small").json)
    labels = set(chart["data"][0]["y"])
    assert "mpi · mpi · processes 2\u00d71  r1" in labels
    assert len(chart["data"]) == 12
    assert len(labels) == 1 + 1 + 2 + 2


@pytest.fixture(scope="module")
def all_strategies(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """All local strategies under two launchers."""
    ways = [*fabricate.LOCAL_WAYS]
    ways += [dataclasses.replace(way, launcher="spark") for way in fabricate.LOCAL_WAYS]
    folder = tmp_path_factory.mktemp("strategies")
    return compare_run(fabricate.make_run(folder / "run", ways, repeats=2))


def test_a_run_of_all_strategies_has_all_its_sections(all_strategies: Comparison) -> None:
    page = Page(render(all_strategies))
    anchors = {a.get("id") for tag, a in page.tags if tag == "h2"}
    links = {(a.get("href") or "").removeprefix("#") for tag, a in page.tags if tag == "a"}
    assert {"local", "pipelines"} <= anchors
    assert anchors == links
    assert "11.1 %" in page.words  # the theoretical bubble, 1 / 9
    assert "pipeline bubble" in page.words
    assert "0-1 (replicas: 0 | 1)" in page.words


def test_colours_follow_the_strategy_where_there_are_many_configurations(all_strategies) -> None:
    chosen, rows = colours(all_strategies), all_strategies.rows
    by_strategy = {row.setup.local_strategy: chosen[row.configuration] for row in rows}
    assert len(set(by_strategy.values())) == 6
    assert all(chosen[row.configuration] == by_strategy[row.setup.local_strategy] for row in rows)


def test_chosen_baseline_is_named_and_empty_sections_are_left_out(comparison, tmp_path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    page = Page(render(compare_run(run, baseline="*.mpi.*")))
    assert "tiny: speedups are over mpi" in page.words
    anchors = {a.get("id") for tag, a in page.tags if tag == "h2"}
    assert not anchors & {"local", "pipelines", "local-global"}
    assert "speedups are over" not in render(comparison)


def test_causes_of_differences_are_shown(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    page = render(compare_run(fabricate.make_run(tmp_path, ways, repeats=3, jitter=0.01)))
    assert "Causes of the differences" in page
    assert "fewer allocated cores" in page


def test_checks_of_repeats_are_combined_by_name(tmp_path: Path) -> None:
    """A repeat of a script may have a check that the others lack."""
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    first, second = compare_run(run).trials["tiny.mpi.mpi.processes.n1r2t1.fp32"]
    assert first.equivalence is not None
    assert second.equivalence is not None
    failed = dataclasses.replace(second.equivalence.checks[-1], passed=False)
    extra = dataclasses.replace(failed, name="not checked", passed=None)
    other = dataclasses.replace(
        second.equivalence, checks=(extra, *second.equivalence.checks[:-1], failed)
    )
    found = worst_checks([first.equivalence, other])
    assert set(found) == {*(check.name for check in first.equivalence.checks), "not checked"}
    assert [name for name, check in found.items() if check.passed is False] == [failed.name]


def test_every_figure_and_table_says_that_hosts_took_turns(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    for _, files in run.trials():
        for _, rank in files.ranks():
            found = json.loads(rank.environment.read_text())
            rank.environment.write_text(json.dumps({**found, "dilation": 2}))
    comparison = compare_run(run)
    mark = "hosts in turns (dilation 2)"
    assert any("2 hosts took turns" in flag for flag in comparison.flags)
    figures = charts(comparison)
    assert figures
    assert all(chart.title.endswith(mark) for chart in figures.values())
    for section in document.page_sections(comparison):
        assert all(title.endswith(mark) for title in table_titles(section))
    assert mark in comparison_text(comparison)
    rows = [trial for trials in comparison.trials.values() for trial in trials]
    assert all(trial.time_to_first_step_s is None for trial in rows)
    assert all(trial.disturbance is None for trial in rows)
    for phases in (each for trial in rows for each in trial.phases):
        assert {phases.whole[name] for name in ("launch", "imports", "teardown")} == {None}
        known = [value for value in phases.whole.values() if value is not None]
        assert sum(known) == pytest.approx(phases.wall_s)


def table_titles(section: Section) -> list[str]:
    own = [] if section.table is None else [section.table.title]
    return own + [title for part in section.parts for title in table_titles(part)]
