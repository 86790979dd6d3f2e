"""`paceline predict`: options, the table, JSON, and refusals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.analysis.simulation import simulate
from paceline.cli.main import main
from paceline.cli.predict import numbers


@pytest.fixture
def run_dir(fabricate: ModuleType, tmp_path: Path) -> Path:
    fabricate.make_run(tmp_path / "run", [fabricate.SEQUENTIAL, fabricate.MPI_GLOO])
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("text", "expected"), [("4", (4,)), ("1..3", (1, 2, 3)), ("8,1..2", (1, 2, 8))]
)
def test_numbers_of_nodes(text: str, expected: tuple[int, ...]) -> None:
    assert numbers(text) == expected


@pytest.mark.parametrize("text", ["", "0", "3..1", "x", "1..9999999"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"as in 1\.\.64"):
        numbers(text)


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
        (["--rack-hosts", "4"], "expected --simulate with them"),
        (["--simulate", "--oversubscription", "4"], "expected --rack-hosts with it"),
    ],
)
def test_wrong_options_say_what_was_expected(run_dir: Path, capsys: Any, words, expected) -> None:
    assert main(["predict", str(run_dir), *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rack-hosts", "0"], "expected a whole number of at least 1, got 0"),
        (["--oversubscription", "0.5"], "expected a number of at least 1, got 0.5"),
        (["--latency", "0"], "expected seconds above 0, got 0"),
        (["--micro-batches", "0"], "expected a whole number of at least 1, got 0"),
        (["--global-batch", "many"], "expected a whole number of at least 1, got many"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(run_dir: Path, capsys: Any, words, expected) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(run_dir), *words])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_simulation_without_simgrid_says_what_to_install(
    run_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "why_not", lambda: "SimGrid is not installed; install it")
    assert main(["predict", str(run_dir), "--simulate"]) == 3
    assert "--simulate: SimGrid is not installed; install it" in capsys.readouterr().err


@pytest.mark.needs("simgrid")
def test_predictions_name_the_simulated_network(run_dir: Path, capsys: Any) -> None:
    words = "--nodes 2 --link 1gbit --scaling weak --simulate --rack-hosts 1 --oversubscription 2"
    assert main(["predict", str(run_dir), *words.split(), "--json"]) == 0
    assumptions = json.loads(capsys.readouterr().out)["assumptions"]
    expected = "contention as SimGrid simulates it: racks of 1 hosts, uplinks oversubscribed 2:1"
    assert expected in assumptions
