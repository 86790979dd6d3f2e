"""A user's mistakes: one clear message, the documented exit code, never a stack trace."""

from __future__ import annotations

import json
import re

import pytest
from tests.functional.cli_runs import SMALL, small, trial

from paceline.base.host.machine import usable_cores

REFUSED_WITHIN_S = 5.0  # what the project promises
pytestmark = pytest.mark.functional


def complaint(result, code):
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr


def test_missing_data_set_says_how_to_make_one(paceline, tmp_path):
    spec = tmp_path / "missing.toml"
    spec.write_text(small("nowhere"))
    assert "paceline data ingest" in complaint(paceline.main("run", spec), 3)


def test_missing_mpirun_is_found_before_anything_runs(paceline, tmp_path):
    spec = tmp_path / "mpi.toml"
    spec.write_text(SMALL + trial("mpi", "mpi") + '[mpi]\nmpirun = "/no/mpirun"\n')
    out = tmp_path / "run"
    assert "/no/mpirun" in complaint(paceline.main("run", spec, "--out", out), 3)
    assert not (out / "trials").exists()


def test_more_ranks_than_cores_are_left_out_with_both_numbers(paceline, tmp_path, tiny_dataset):
    spec = tmp_path / "many.toml"
    spec.write_text(
        small(tiny_dataset, global_batch=4096)
        + trial("mpi", "mpi").replace("= 2", "= 4096").replace("oversubscribe = true", "")
    )
    planned = paceline.main("plan", spec, "--json")
    assert planned.returncode == 0, planned.stderr
    message = json.dumps(json.loads(planned.stdout)["left_out"])
    assert "4096" in message
    assert re.search(rf"\b{usable_cores()}\b", message), message


def test_run_directory_in_use_is_not_overwritten(paceline, tmp_path):
    spec = tmp_path / "small.toml"
    spec.write_text(SMALL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    assert "--out" in complaint(paceline.main("run", spec, "--out", tmp_path / "run"), 2)
    assert (tmp_path / "run" / "mine.txt").read_text() == "precious"
