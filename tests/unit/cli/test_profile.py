"""Which trials `paceline profile` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis import operations as made

from paceline.cli import main

MPI = "tiny.mpi.mpi.processes.n1r2t1.fp32.r0"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = fabricate.make_run(
        tmp_path / "run", [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.TORCHRUN]
    )
    made.two_buckets(run.trial(MPI))
    return tmp_path / "run"


def test_several_trials_are_a_line_each(run_dir: Path, output: Any) -> None:
    out = output("profile", run_dir)
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["mpi.mpi", "torchrun.gloo"]
    assert "sequential" not in out
    assert f"--trial {MPI}" in out.replace("\n", " ")


def test_one_trial_is_shown_in_detail(run_dir: Path, output: Any) -> None:
    assert "Operations in a step" in output("profile", run_dir, "--trial", MPI)


def test_json_has_all_or_the_one(run_dir: Path, output: Any) -> None:
    document = json.loads(output("profile", run_dir, "--json"))
    assert document["schema"] == 2
    assert [t["operations_recorded"] for t in document["trials"]] == [True, False]
    one = json.loads(output("profile", run_dir, "--trial", MPI, "--json"))
    assert [t["trial"] for t in one["trials"]] == [MPI]


def test_unknown_trial_is_answered_with_those_there_are(run_dir: Path, capsys: Any) -> None:
    assert main(["profile", str(run_dir), "--trial", "nope"]) == 2
    assert MPI in capsys.readouterr().err


def test_run_in_which_nobody_communicates_is_bad_data(tmp_path, capsys) -> None:
    fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL])
    assert main(["profile", str(tmp_path)]) == 4
    assert "a single rank does not communicate" in capsys.readouterr().err


def test_folder_without_trials_is_bad_data(tmp_path: Path, capsys: Any) -> None:
    assert main(["profile", str(tmp_path)]) == 4
    assert "expected a run directory" in capsys.readouterr().err
