"""What `paceline explain` shows: a pair, or the fastest against all others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate

from paceline.cli import main


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.TORCHRUN]
    fabricate.make_run(tmp_path / "run", ways, repeats=3, jitter=0.01)
    return tmp_path / "run"


def test_all_configurations_are_compared_with_the_fastest(run_dir: Path, output: Any) -> None:
    out = output("explain", run_dir)
    assert "Steps compared with those of" in out
    assert f"paceline explain {run_dir} --pair tiny." in out
    assert all(len(line) <= 80 for line in out.splitlines()[:-1])


def test_a_pair_is_shown_with_parts_causes_and_evidence(run_dir: Path, output: Any) -> None:
    out = output("explain", run_dir, "--pair", "*.mpi.*", "*.sequential.*")
    for words in ("whole step", "fewer allocated cores", "CPU idle", "not available", "imports"):
        assert words in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_json_has_parts_that_add_up(run_dir: Path, output: Any) -> None:
    out = output("explain", run_dir, "--pair", "*.sequential.*", "*.mpi.*", "--json")
    (found,) = json.loads(out)["explanations"]
    assert found["faster"].startswith("tiny.mpi.")
    assert found["significant"]
    whole = found["difference_s"]["mean"]
    assert sum(p["difference_s"]["mean"] for p in found["parts"]) == pytest.approx(whole)
    assert {e["name"] for e in found["evidence"]} >= {"cpu_idle", "iowait", "threads", "others"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--pair", "*.mpi.*"], "requires 2 arguments"),
        (["--pair", "*.mpi.*", "tiny.mpi*"], "both are"),
        (["--pair", "*", "*.mpi.*"], "it matches"),
        (["--pair", "*.spark.*", "*.mpi.*"], "no configuration matches"),
        (["--only", "*.spark.*"], "no configuration matches"),
        (["*.mpi.*"], "To explain only some configurations of RUN_DIR, use --only '*.mpi.*'."),
        (["--only", "*", "--pair", "a", "b"], "expected one of them"),
    ],
)
def test_wrong_use_says_what_to_do(run_dir: Path, capsys: Any, words, expected) -> None:
    assert main(["explain", str(run_dir), *words]) == 2
    assert expected in capsys.readouterr().err


def test_one_matching_configuration_is_explained_against_the_fastest(run_dir, output) -> None:
    out = output("explain", run_dir, "--only", "*.sequential.*")
    assert "sequential takes" in " ".join(out.split())
    assert "whole step" in out


def test_only_selects_what_has_shorter_steps_but_reaches_the_target_later(
    tmp_path: Path, output: Any
) -> None:
    hasty = dataclasses.replace(
        fabricate.MPI, transport="gloo", transfer_s=0.0, learned=1.0, compression={"method": "topk"}
    )
    case = fabricate.Case(
        evaluate_every_steps=2, target=fabricate.Target(metric="accuracy", at_least=0.6)
    )
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, hasty]
    run = fabricate.make_run(tmp_path / "run", ways, cases=[case], repeats=3, jitter=0.01)
    out = output("explain", run.root, "--only", "*.gloo.*", "--json")
    (found,) = json.loads(out)["explanations"]
    assert ".gloo." in found["faster"]
    assert ".mpi.mpi." in found["slower"]
