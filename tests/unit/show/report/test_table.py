"""The table fits the terminal and says what the comparison found."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.statistics.intervals import Interval
from paceline.measure.records.documents import LookRecord, Stopping, write_stopping
from paceline.show.report.table import comparison_text, comparison_view
from paceline.show.report.verdict import verdict_sentence
from paceline.show.report.wording import number


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    broken = dataclasses.replace(fabricate.SPARK, weights_error=1.0, gradient_error=1.0)
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.TORCHRUN, fabricate.MPI, broken]
    return compare_run(fabricate.make_run(tmp_path, ways, repeats=2, jitter=0.01))


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(comparison: Comparison, width: int) -> None:
    assert max(map(len, comparison_text(comparison, width).splitlines())) <= width


def test_the_verdict_comes_first(comparison: Comparison) -> None:
    text = comparison_text(comparison, 80)
    assert text.startswith("tiny: The fastest is processes under mpi on two cores, 1.8")
    words = " ".join(text.split())
    assert "Next is intraop with 0.9" in words
    assert "This run could show differences of" in words
    assert "is not ranked: first_gradient" in words


def test_the_verdict_states_the_lead_over_the_baseline_once(comparison: Comparison) -> None:
    (baseline,) = (row for row in comparison.rows if row.is_baseline)
    verdict = dataclasses.replace(comparison.verdicts["tiny"], runner_up=baseline.configuration)
    found = dataclasses.replace(comparison, verdicts={"tiny": verdict})
    words = verdict_sentence(found, "tiny")
    assert words.count("\u00d7") == 1
    assert "\u00d7 one process (" in words
    assert "One process is next, slower mainly because of " in words


def test_launcher_transport_strategy_and_layout_are_columns(comparison: Comparison) -> None:
    lines = comparison_text(comparison, 80).splitlines()
    row = next(line.split() for line in lines if " mpi " in line and line.endswith("✓"))
    assert row[3:7] == ["processes", "2\u00d71", "mpi", "mpi"]
    assert next(line for line in lines if " spark " in line).endswith("✗")


def test_mark_of_first_steps_is_explained(comparison: Comparison) -> None:
    assert "✓¹" not in comparison_text(comparison, 80)
    rows = tuple(
        dataclasses.replace(
            row, equivalence=dataclasses.replace(row.equivalence, equivalence_grade="start")
        )
        if row.setup.launcher == "mpi"
        else row
        for row in comparison.rows
    )
    text = comparison_text(dataclasses.replace(comparison, rows=rows), 80)
    assert any(" mpi " in line and line.endswith("✓¹") for line in text.splitlines())
    assert "✓¹: shown for the first steps only; ✓: for the whole training." in text


def test_every_row_has_its_main_cost(comparison: Comparison) -> None:
    text = comparison_text(comparison, 80)
    costs = ("compute", "transfer", "waiting", "data wait")
    rows = [line for line in text.splitlines() if line.endswith(("✓", "✗"))]
    assert len(rows) == 5
    assert all(any(cost in row for cost in costs) for row in rows)


def test_rows_are_sorted_by_the_first_figure(comparison: Comparison) -> None:
    lines = comparison_text(comparison, 80).splitlines()
    shown = [float(line.split()[0].lstrip("=?")) for line in lines if line.endswith("✓")]
    assert shown == sorted(shown, reverse=True)


UNDECIDED = (
    "tiny: Undecided which of two configurations is the fastest; ahead is processes under mpi",
    "The other: processes under mpi over ",
    "more repeats are expected to decide",
)
TIE = (
    "tiny: The fastest are two configurations within 3 %, led by processes under mpi over ",
    "The other: processes under mpi over ",
)


@pytest.mark.parametrize(
    ("repeats", "jitter", "sentences", "mark"),
    [(3, 0.05, UNDECIDED, "?1."), (5, 0.001, TIE, "=1.")],
)
def test_equal_configurations_are_undecided_or_tie_within_the_margin(
    tmp_path, repeats, jitter, sentences, mark
) -> None:
    same = dataclasses.replace(fabricate.MPI, transport="gloo")
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, same]
    run = fabricate.make_run(tmp_path, ways, repeats=repeats, jitter=jitter)
    text = " ".join(comparison_text(compare_run(run), 120).split())
    assert [each for each in sentences if each not in text] == []
    assert text.count(mark) == 2


def test_one_repeat_is_said_to_decide_nothing(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    once = compare_run(fabricate.make_run(tmp_path / "1", ways, jitter=0.01))
    text = " ".join(comparison_text(once, 80).split())
    assert "No verdict: with one repeat the run-to-run noise is unknown" in text
    assert "fastest" not in text.casefold()
    assert "±?" in text
    twice = compare_run(fabricate.make_run(tmp_path / "2", ways, repeats=2, jitter=0.01))
    assert "ne repeat" not in comparison_text(twice, 80)


def test_run_without_a_measured_step_says_so_and_not_that_rows_differ(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    run = fabricate.make_run(tmp_path, ways, cases=[fabricate.Case(steps=2)], repeats=2)
    comparison = compare_run(run)
    assert [row.equivalence.equivalent for row in comparison.rows] == [True, True]
    text = " ".join(comparison_text(comparison, 80).split())
    assert "No configuration is ranked, because no step after the warm-up was measured." in text
    assert text.count("is not ranked: no step after the warm-up was measured") == 2


@pytest.mark.parametrize(
    ("low", "high", "shown"), [(0.35, 7.34, "1.50 (0.3\u20137.3)"), (0.0, math.inf, "1.50 ±?")]
)
def test_wide_interval_is_printed_and_an_unknown_one_is_marked(
    comparison: Comparison, low: float, high: float, shown: str
) -> None:
    wide = Interval(estimate=1.5, low=low, high=high)
    rows = [
        row if row.is_baseline or row.speed.speedup is None
        else dataclasses.replace(row, speed=dataclasses.replace(row.speed, speedup=wide))
        for row in comparison.rows
    ]  # fmt: skip
    text = comparison_text(dataclasses.replace(comparison, rows=tuple(rows)), 80)
    assert shown in text


def test_without_a_baseline_there_is_no_column_of_speedups(tmp_path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.MPI])
    assert "speedup" not in comparison_text(compare_run(run), 80)


def test_without_colours_there_is_no_escape(comparison: Comparison) -> None:
    assert "\x1b" not in comparison_text(comparison, 80)
    console = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=80)
    with console.capture() as captured:
        console.print(comparison_view(comparison, 80))
    assert "\x1b[3" not in captured.get()  # no foreground colour


def test_failed_trials_and_flags_are_shown(tmp_path: Path) -> None:
    way = dataclasses.replace(fabricate.MPI, affinity=(0, 1, 2))
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, way, fabricate.SPARK])
    failed = next(f for name, f in run.trials() if ".spark." in name)
    fabricate.edit_json(failed.outcome, status="timed_out", exit_code=6, message="[bold]late[/]")
    text = " ".join(comparison_text(compare_run(run), 100).split())
    assert "timed_out: [bold]late[/]" in text
    assert "planned 2 cores on node0, found 3" in text


def test_failed_configuration_has_a_row(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.SPARK])
    failed = next(f for name, f in run.trials() if ".spark." in name)
    fabricate.edit_json(failed.outcome, status="failed", exit_code=5, message="rank 1: killed")
    lines = comparison_text(compare_run(run), 80).splitlines()
    row = next(line.split() for line in lines if " spark " in line)
    assert row[0] == "failed"
    assert row[2:4] == ["processes", "2\u00d71"]
    assert any("rank 1: killed" in line for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"), (math.nan, "\u2013"), (math.inf, "∞"), (0.0, "0"), (-0.05, "-0.0500"),
        (1234.5, "1234"), (1000.0, "1000"), (93.84, "93.8"), (5.064, "5.06"), (0.001, "0.00100"),
        (0.6824, "0.682"), (0.01234, "0.0123"), (4.88e-4, "4.88e-04"), (1.0, "1.00"),
    ],
)  # fmt: skip
def test_numbers_keep_three_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_chosen_baseline_is_named(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    text = " ".join(comparison_text(compare_run(run, baseline="*.mpi.*"), 120).split())
    assert "1 (base)" in text
    assert "tiny: speedups are over mpi" in text
    assert "equivalence is relative to the sequential baseline." in text
    assert "speedups are over" not in comparison_text(compare_run(run), 120)


@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        ("decided", "slower than the fastest or within 5 % of it."),
        ("max_repeats", "the ranking is not decided, but max_repeats is reached."),
        ("time", "the ranking is not decided, but limits.run_s is reached."),
    ],
)
def test_end_of_automatic_repeats_is_explained(tmp_path, stopped, words) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    looks = (LookRecord(repeats=2, level=0.003, undecided={}),)
    write_stopping(run, Stopping(max_repeats=8, tie_margin=0.05, looks=looks, stopped=stopped))
    text = " ".join(comparison_text(compare_run(run), 120).split())
    assert "repeats = auto, 2 of at most 8: " in text
    assert words in text


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    own = fabricate.scaled_way
    ways = [own(), own(ranks=4, transfer_s=0.1), own(nodes=2), own(launcher="spark", threads=2)]
    return compare_run(fabricate.make_weak_scaling(tmp_path_factory.mktemp("scaled"), *ways))


@pytest.mark.parametrize("width", [80, 120])
def test_weak_scaling_comes_first_and_fits_the_terminal(scaled: Comparison, width: int) -> None:
    lines = comparison_text(scaled, width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "Weak scaling of tiny, 8 samples for each replica"
    assert sum("Weak scaling" in line for line in lines) == 1
    verdict = next(n for n, line in enumerate(lines) if line.startswith("tiny-batch8: "))
    shown = lines[:verdict]
    words = [line.split() for line in shown if line.endswith("✓")]
    assert len(words) == 5  # that of one replica once
    assert any("0.95" in line for line in shown)  # 0.635 s over 0.665 s


def test_weak_scaling_with_wide_intervals_is_not_cut_off(tmp_path: Path) -> None:
    own = fabricate.scaled_way
    run = fabricate.make_weak_scaling(tmp_path, own(), own(ranks=4), jitter=2.0)
    table = comparison_text(compare_run(run), 80).split("\n\n")[0]
    assert "\u2013" in table  # bounds, which are longer than a share
    for heading in ("re- global", "samples/s", "through-", "effi-", "ciency eq."):
        assert heading in table
    assert "4\u00d71" in table


def test_strategy_without_one_replica_says_what_to_add(scaled: Comparison) -> None:
    words = " ".join(comparison_text(scaled, 80).split())
    assert (
        "processes 2\u00d72: no efficiency, because no equivalent configuration with one replica "
        "of 2 threads in fp32 has finished; add one to the [[trials]]"
    ) in words


def test_selected_rows_keep_the_weak_scaling_of_their_workload(scaled: Comparison) -> None:
    rows = tuple(row for row in scaled.rows if row.workload == "tiny-batch16")
    shown = dataclasses.replace(scaled, rows=rows)
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(comparison_view(shown, 80, scaled))
    text = captured.get()
    assert "Weak scaling of tiny" in text
    assert "tiny-batch8: " not in text
