"""`paceline compare`: which rows it shows, in which order and form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate

from paceline.base.errors import ExitCode
from paceline.cli import main


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.TORCHRUN]
    fabricate.make_run(tmp_path / "run", ways, repeats=2, jitter=0.01)
    return str(tmp_path / "run")


@pytest.fixture
def rows_of(output: Any, run_dir: str) -> Any:
    return lambda *words: json.loads(output("compare", run_dir, *words, "--json"))["rows"]


def test_only_matching_rows_are_shown_with_the_verdict_on_all(run_dir, rows_of, output) -> None:
    rows = rows_of("--only", "*.mpi.*,*.sequential.*")
    assert {row["launcher"] for row in rows} == {"mpi", "local"}
    some = output("compare", run_dir, "--only", "*.mpi.*")
    assert "torchrun" not in some.partition("strategy")[2]
    assert some.splitlines()[0] == output("compare", run_dir).splitlines()[0]
    assert not Path(run_dir, "comparison.json").exists()  # written by `paceline run` only


def test_pattern_without_a_match_lists_the_names(run_dir: str, capsys: Any) -> None:
    assert main(["compare", run_dir, "--only", "*.spark.*"]) == ExitCode.USAGE
    shown = capsys.readouterr().err
    assert "no configuration matches '*.spark.*'" in shown
    assert "tiny.mpi.mpi" in shown


@pytest.mark.parametrize(
    ("column", "figure", "sign"),
    [("samples", "samples_per_s", -1), ("step", "step_s", 1), ("efficiency", "efficiency", -1)],
)
def test_rows_are_sorted_with_the_best_first(
    rows_of: Any, column: str, figure: str, sign: int
) -> None:
    values = [sign * row[figure]["estimate"] for row in rows_of("--sort", column)]
    assert values == sorted(values)


@pytest.mark.parametrize("column", ["launcher", "transport", "memory", "cpu", "first-step"])
def test_every_column_can_be_sorted(rows_of: Any, column: str) -> None:
    assert len(rows_of("--sort", column)) == 3


def test_markdown_has_the_verdict_and_a_table(run_dir: str, output: Any) -> None:
    lines = output("compare", run_dir, "--markdown").splitlines()
    assert lines[0].startswith("tiny: ")
    heading = next(n for n, line in enumerate(lines) if line.startswith("| speedup | samples /s |"))
    table = lines[heading : heading + 5]
    assert len({line.count("|") for line in table}) == 1
    assert set(table[1]) <= set("|-: ")
    assert "| processes |" in "".join(table)


def test_two_runs_as_markdown(run_dir: str, tmp_path: Path, output: Any) -> None:
    fabricate.make_run(tmp_path / "new", [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    assert "| --- |" in output("compare", run_dir, tmp_path / "new", "--markdown")


@pytest.mark.parametrize("words", [["--baseline", "x"], ["--only", "x"], ["--sort", "step"]])
def test_options_of_one_run_are_refused_for_two(
    run_dir: str, capsys: Any, words: list[str]
) -> None:
    assert main(["compare", run_dir, run_dir, *words]) == ExitCode.USAGE
    assert "expected one run, got two" in capsys.readouterr().err
