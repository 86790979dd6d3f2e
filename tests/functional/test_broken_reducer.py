"""A reducer that sums where it should average trains something else, and is caught."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.support.commands import run_command
from tests.support.environment import AS_ROOT
from tests.support.forking import LOADED_WITH
from tests.support.job_specs import NO_SIDECAR, job_words

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "mpi-jobs" / "train.py"
KEYS = {  # as in SMALL
    "seed": 3, "max_steps": 20, "epochs": 8, "warmup_steps": 2, "global_batch": 16,
    "image_size": 128, "dropout": False, "transport": "gloo", "ranks_per_node": 2,
    "telemetry": NO_SIDECAR, "oversubscribe": True,
}  # fmt: skip


def test_sum_instead_of_mean_is_not_equivalent(paceline, small_run, forks, tmp_path):
    out = shutil.copytree(small_run, tmp_path / "run")
    dataset = json.loads((out / "manifest.json").read_text())["data"]["tiny"]

    mpirun = Path(sys.executable).with_name("mpirun")
    argv = [mpirun, "-n", "2", "--bind-to", "none", "--host", "localhost:2"]
    argv += [*forks.python, HERE / "programs" / "broken_reducer.py", SCRIPT]
    argv += [*job_words(tmp_path, "mpi", data=dataset, **KEYS), "--out", out]
    broken = run_command(argv, 120, env={**os.environ, **LOADED_WITH, **AS_ROOT})
    assert broken.returncode == 0, broken.stderr

    compared = paceline.main("compare", out, "--json")
    assert compared.returncode == 0, "a trial that is not equivalent is a result, not an error"
    comparison = json.loads(compared.stdout)
    equivalent = {row["launcher"]: row["equivalent"] for row in comparison["rows"]}
    assert equivalent == {"local": True, "mpi": False}
    # a trial that trained something else is not ranked
    assert comparison["verdict"]["best"].startswith("tiny.local.none.sequential")
    assert "✗" in paceline.main("compare", out).stdout
