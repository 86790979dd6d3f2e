"""`paceline recommend`: the sentence comes first, kinds are apart."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.cli.main import main


@pytest.fixture
def run_dir(fabricate: ModuleType, tmp_path: Path) -> Path:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.MPI_GLOO]
    fabricate.make_run(tmp_path / "run", ways, repeats=3, jitter=0.02)
    return tmp_path / "run"


@pytest.mark.parametrize("goal", ["time", "cost", "memory", "energy"])
def test_the_recommendation_comes_first(run_dir: Path, capsys: Any, goal: str) -> None:
    assert main(["recommend", str(run_dir), "--goal", goal]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny: ")
    expected = "energy is not available" if goal == "energy" else f"needs the least {goal}"
    assert expected in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_measured_and_predicted_are_ranked_apart(run_dir: Path, capsys: Any) -> None:
    words = ["--nodes", "4", "--link", "10gbit", "--scaling", "weak"]
    assert main(["recommend", str(run_dir), *words]) == 0
    out = capsys.readouterr().out
    assert out.index("measured, s per") < out.index("predicted, not measured")
    assert "on 4 nodes" in " ".join(out.split())


def test_json_names_the_next_measurement(run_dir: Path, capsys: Any) -> None:
    assert main(["recommend", str(run_dir), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["recommendations"]
    assert found["goal"] == "time"
    assert len(found["measured"]) == 3
    assert found["predicted"] == []
    assert "next_measurement" in found


def test_an_unknown_goal_is_wrong_use(run_dir: Path) -> None:
    with pytest.raises(SystemExit):
        main(["recommend", str(run_dir), "--goal", "fame"])


def test_a_guide_compares_runs_and_files(
    run_dir: Path, fabricate: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    assert main(["compare", str(run_dir), "--json"]) == 0
    file = tmp_path / "recorded.json"
    file.write_text(capsys.readouterr().out)
    other = fabricate.Case(workload="own")
    fabricate.make_run(tmp_path / "own", [fabricate.SEQUENTIAL, fabricate.MPI], cases=[other])
    assert main(["recommend", "--guide", str(run_dir), str(file), str(tmp_path / "own")]) == 0
    page = capsys.readouterr().out
    assert "| [own](#own) | own training | 8 | 41 |" in page
    assert page.count("**mpi · mpi · processes 2") == 3
    assert "| 1 node | **`processes` 3 of 3**, `sequential` 0 of 3 |" in page
    assert "one repeat: without the noise between runs" in page
    not_measured = page.partition("## Not measured")[2].partition("To measure")[0]
    assert "complex-small" in not_measured
    assert "tiny" not in not_measured


def test_a_guide_of_nothing_is_refused(fabricate: ModuleType, tmp_path: Path, capsys: Any) -> None:
    fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL])
    assert main(["recommend", "--guide", str(tmp_path)]) == 7
    assert "expected two equivalent configurations" in capsys.readouterr().err
