"""A fabricated run with two trials: one alone, and two ranks that communicate."""

from __future__ import annotations

import pytest
from tests.unit.analysis import fabricate, operations

from paceline.show.export.run_data import RunData


@pytest.fixture
def run(tmp_path):
    files = fabricate.make_run(tmp_path / "run", [fabricate.SEQUENTIAL, fabricate.MPI])
    fabricate.edit_json(
        files.manifest,
        versions={"torch": "2.13.0"},
        created_unix_s=1.7e9,
        git={"commit": "abc123", "has_local_changes": False},
    )
    operations.two_buckets(next(files for name, files in files.trials() if ".mpi." in name))
    return RunData(files)


@pytest.fixture
def alone(run):
    return next(r.trial.id for r in run.trials if r.trial.launcher == "local")


@pytest.fixture
def pair(run):
    return next(r.trial.id for r in run.trials if r.trial.launcher == "mpi")
