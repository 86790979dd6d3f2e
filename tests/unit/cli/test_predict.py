"""`paceline predict`: options, the table, JSON, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.predict.prediction import ShareMeasurement
from paceline.base.errors import EnvironmentLacks, ExitCode, NotComparable, PacelineError
from paceline.base.host.own_runs import remember_run
from paceline.cli import main
from paceline.cli.predict import node_numbers
from paceline.measure.records.layout import RunFiles


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI_GLOO]
    fabricate.make_run(tmp_path / "run", ways, repeats=3, jitter=0.01)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("text", "expected"), [("4", (4,)), ("1..3", (1, 2, 3)), ("8,1..2", (1, 2, 8))]
)
def test_numbers_of_nodes(text: str, expected: tuple[int, ...]) -> None:
    assert node_numbers(text) == expected


@pytest.mark.parametrize("text", ["", "0", "3..1", "x", "1..9999999"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"as in 1\.\.64"):
        node_numbers(text)


def test_predictions_fit_80_columns_and_are_marked_as_such(run_dir: Path, output: Any) -> None:
    options = ("--nodes", "1..64", "--link", "10gbit", "--scaling", "weak")
    out = output("predict", run_dir, *options)
    words = " ".join(out.split())
    assert "2 nodes, processes 2\N{MULTIPLICATION SIGN}1 over gloo: 2" in words
    assert "So they are faster." in words
    assert out.index("So they are faster.") < out.index("nodes strategy")
    assert "Predicted, not measured" in words
    assert "cannot be estimated from 30 steps" in words
    assert all(len(line) <= 80 for line in out.splitlines())


def test_json_has_predictions_and_refusals(run_dir: Path, output: Any) -> None:
    out = output("predict", run_dir, "--nodes", "1,2", "--link", "1gbit", "--json")
    document = json.loads(out)
    assert {p["nodes"] for p in document["predictions"]} == {1, 2}
    assert [w["global_batch"] for w in document["unmeasured"]] == [4]
    assert document["confidence"] == 0.9


def test_nothing_to_predict_is_an_error_with_what_to_measure(tmp_path: Path, capsys: Any) -> None:
    fabricate.make_run(tmp_path / "once", [fabricate.SEQUENTIAL])
    assert main(["predict", str(tmp_path / "once"), "--nodes", "4", "--link", "1gbit"]) == 7
    assert "at least two repeats" in capsys.readouterr().err


def test_measure_says_how_long_it_takes_and_then_answers(
    run_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def run_share(files: RunFiles, wanted: ShareMeasurement, progress: Any) -> None:
        del progress
        ways = [fabricate.SEQUENTIAL, fabricate.MPI_GLOO]
        case = fabricate.Case(global_batch=wanted.global_batch)
        fabricate.make_run(files.shares / "b", ways, cases=[case], repeats=3, jitter=0.01)
        measured.append(wanted.global_batch)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.predict.run_share", run_share)
    monkeypatch.setattr("paceline.cli.predict.check_machine", lambda *_: None)
    remember_run(run_dir)
    words = ["predict", str(run_dir), "--nodes", "2", "--link", "1gbit"]
    assert main(words) == 0
    assert "--measure runs short trials" in " ".join(capsys.readouterr().out.split())
    with monkeypatch.context() as interrupted:
        interrupted.setattr("paceline.cli.predict.run_share", interrupt)
        assert main([*words, "--measure"]) == ExitCode.INTERRUPTED
    command = f"Continue with: paceline predict {run_dir} --nodes 2 --link 1gbit --measure"
    assert command in capsys.readouterr().err.splitlines()
    assert main([*words, "--measure"]) == 0
    shown = capsys.readouterr()
    assert measured == [4]
    assert "6 short trials with 4 samples in a step: about" in shown.err
    assert "--measure" not in shown.out
    assert main([*words, "--measure"]) == 0  # nothing is left to measure
    assert measured == [4]


def test_nothing_is_measured_where_nothing_can_be_predicted(
    run_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_share(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("paceline.cli.predict.run_share", run_share)
    remember_run(run_dir)
    words = ["predict", str(run_dir), "--nodes", "2", "--measure"]
    assert main(words) == NotComparable.exit_code
    assert "give the link (--link 10gbit)" in capsys.readouterr().err


def test_what_could_be_measured_is_predicted_although_a_trial_failed(
    run_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_share(files: RunFiles, wanted: ShareMeasurement, _: Any) -> PacelineError:
        case = fabricate.Case(global_batch=wanted.global_batch)
        ways = [fabricate.SEQUENTIAL, fabricate.MPI_GLOO]
        fabricate.make_run(files.shares / "b", ways, cases=[case], repeats=3, jitter=0.01)
        return EnvironmentLacks("trial x: too few rounds of slices")

    monkeypatch.setattr("paceline.cli.predict.run_share", run_share)
    monkeypatch.setattr("paceline.cli.predict.check_machine", lambda *_: None)
    remember_run(run_dir)
    words = ["predict", str(run_dir), "--nodes", "2", "--link", "1gbit", "--measure"]
    assert main(words) == EnvironmentLacks.exit_code
    shown = capsys.readouterr()
    assert "Predicted, not measured" in " ".join(shown.out.split())
    assert "too few rounds of slices" in shown.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--link", "fast"], "expected a rate"),
        (["--latency", "0.1"], "expected --link with it"),
        (["--transport", "pigeons"], "pigeons"),
        (["--latency", "0"], "0.0 is not in the range x>0"),
        (["--micro-batches", "0"], "0 is not in the range x>=1"),
        (["--global-batch", "many"], "'many' is not a valid integer range"),
    ],
)
def test_wrong_options_say_what_was_expected(run_dir: Path, capsys: Any, words, expected) -> None:
    assert main(["predict", str(run_dir), *words]) == 2
    assert expected in capsys.readouterr().err
