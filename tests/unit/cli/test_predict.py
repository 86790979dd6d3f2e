"""`paceline predict`: options, the table, JSON, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from paceline.cli import main
from paceline.cli.predict import NodeNumbers


@pytest.fixture
def run_dir(fabricate: ModuleType, tmp_path: Path) -> Path:
    fabricate.make_run(tmp_path / "run", [fabricate.SEQUENTIAL, fabricate.MPI_GLOO])
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("text", "expected"), [("4", (4,)), ("1..3", (1, 2, 3)), ("8,1..2", (1, 2, 8))]
)
def test_numbers_of_nodes(text: str, expected: tuple[int, ...]) -> None:
    assert NodeNumbers().convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "0", "3..1", "x", "1..9999999"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"as in 1\.\.64"):
        NodeNumbers().convert(text, None, None)


def test_predictions_fit_80_columns_and_are_marked_as_such(run_dir: Path, capsys: Any) -> None:
    words = ["predict", str(run_dir), "--nodes", "1..64", "--link", "10gbit", "--scaling", "weak"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Predicted, not measured" in out
    assert "cannot be estimated from 10 steps" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_json_has_predictions_and_refusals(run_dir: Path, capsys: Any) -> None:
    words = ["predict", str(run_dir), "--nodes", "1,2", "--link", "1gbit", "--json"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert {p["nodes"] for p in document["predictions"]} == {1}
    assert document["refusals"][0]["nodes"] == [2]
    assert document["confidence"] == 0.9


def test_nothing_to_predict_is_an_error_with_what_to_measure(run_dir: Path, capsys: Any) -> None:
    assert main(["predict", str(run_dir), "--nodes", "4", "--link", "1gbit"]) == 7
    assert "global_batch = 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--link", "fast"], "expected a rate"),
        (["--latency", "0.1"], "expected --link with it"),
        (["--transport", "pigeons"], "pigeons"),
    ],
)
def test_wrong_options_say_what_was_expected(run_dir: Path, capsys: Any, words, expected) -> None:
    assert main(["predict", str(run_dir), *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--latency", "0"], "0.0 is not in the range x>0"),
        (["--micro-batches", "0"], "0 is not in the range x>=1"),
        (["--global-batch", "many"], "'many' is not a valid integer range"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(run_dir: Path, capsys: Any, words, expected) -> None:
    assert main(["predict", str(run_dir), *words]) == 2
    assert expected in capsys.readouterr().err
