"""`paceline recommend`: the sentence comes first, kinds are apart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run
from paceline.cli import main
from paceline.errors import ExitCode
from paceline.records.layout import RunFiles


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.MPI_GLOO]
    fabricate.make_run(tmp_path / "run", ways, repeats=3, jitter=0.02)
    return tmp_path / "run"


@pytest.mark.parametrize("goal", ["time", "cost", "memory"])
def test_the_recommendation_comes_first(run_dir: Path, output: Any, goal: str) -> None:
    out = output("recommend", run_dir, "--goal", goal)
    assert out.startswith("tiny: ")
    assert f"needs the least {goal}" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_measured_and_predicted_are_ranked_apart(run_dir: Path, output: Any) -> None:
    words = ["--nodes", "4", "--link", "10gbit", "--scaling", "weak"]
    out = output("recommend", run_dir, *words)
    assert out.index("measured, s per") < out.index("predicted, not measured")
    assert "on 4 nodes" in " ".join(out.split())


def test_json_names_the_next_measurement(run_dir: Path, output: Any) -> None:
    (found,) = json.loads(output("recommend", run_dir, "--json"))["recommendations"]
    assert found["goal"] == "time"
    assert len(found["measured"]) == 3
    assert found["predicted"] == []
    assert "next_measurement" in found


def test_an_unknown_goal_is_wrong_use(run_dir: Path) -> None:
    assert main(["recommend", str(run_dir), "--goal", "fame"]) == 2


TWINS = [
    fabricate.SEQUENTIAL, fabricate.MPI, dataclasses.replace(fabricate.MPI, transport="gloo"),
]  # fmt: skip


@pytest.fixture
def undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """Return a run of equally fast configurations, which may be measured on this machine."""
    monkeypatch.setattr("paceline.cli.recommend.check_machine", lambda *_: None)
    return fabricate.make_run(tmp_path / "undecided", TWINS, repeats=3, jitter=0.08)


def test_the_undecided_are_repeated_as_a_block(
    undecided: RunFiles, output: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = undecided
    (before,) = json.loads(output("recommend", run.root, "--json"))["recommendations"]
    made: list[str] = []

    def measure(files: RunFiles, names: list[str], trials: Any, progress: Any) -> None:
        del trials, progress
        for way in TWINS:
            trial = fabricate.make_trial_value(way, repeat=3)
            fabricate.make_trial(files.trial(trial.id), trial, way, fabricate.Case(), 2e9, 0.08)
        made.extend(names)

    monkeypatch.setattr("paceline.cli.recommend.run_extra_block", measure)
    document = json.loads(output("recommend", "--measure", run.root, "--json"))
    assert made == before["next_measurement"]["configurations"]
    assert document["measured"] == 3
    rows = compare_run(run).rows
    assert [row.repeats for row in rows] == [4, 4, 4]  # compared like every other repeat


def test_interrupted_measurement_says_how_to_continue(
    undecided: RunFiles, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.recommend.run_extra_block", interrupt)
    words = ["recommend", "--goal", "cost", "--measure", str(undecided.root)]
    assert main(words) == ExitCode.INTERRUPTED
    command = f"Continue with: paceline recommend --goal cost --measure {undecided.root}"
    assert command in capsys.readouterr().err.splitlines()


def test_nothing_is_measured_where_everything_is_decided(
    tmp_path: Path, output: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    run = fabricate.make_run(tmp_path / "run", ways, repeats=3, jitter=0.001)
    monkeypatch.setattr("paceline.cli.recommend.run_extra_block", pytest.fail)
    assert "Nothing was measured" in output("recommend", run.root, "--measure")
