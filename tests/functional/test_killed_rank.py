"""A run that is cut off: everything ends, the message names the cause, `--resume` completes."""

import json
import os
import signal

import pytest
from tests.functional.cli_runs import slowed, trial
from tests.functional.long_runs import ENDLESS, LONG, STARTED_WITHIN_S, alive, running_rank
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

GONE_WITHIN_S = 10.0  # what the project promises


def test_run_whose_rank_0_was_killed_is_completed_by_the_same_command(
    paceline, tmp_path, tiny_dataset
):
    """Rank 0 serves the store, over which ranks report errors to each other."""
    spec, out, log = tmp_path / "long.toml", tmp_path / "run", tmp_path / "log.txt"
    # With this seed the baseline is the first trial.
    spec.write_text(
        LONG.replace("samples = 48", f'data = "{tiny_dataset}"').replace("seed = 3", "seed = 5")
        + trial("mpi", "mpi")
    )
    process = slowed(paceline).start("run", spec, "--out", out, "-x", log=log)
    try:
        pid = wait_for(lambda: running_rank(out, "mpi", 0), STARTED_WITHIN_S, "rank 0 training")
        os.kill(pid, signal.SIGKILL)
        code = process.wait(timeout=GONE_WITHIN_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)
    message = log.read_text()
    assert code == 5, message
    assert "rank 0" in message
    assert "Traceback" not in message
    assert alive(out) == {}
    finished = {p: p.read_bytes() for p in out.glob("trials/tiny.local.*/outcome.json")}
    assert len(finished) == 1, "the baseline had ended"

    result = paceline("run", "--resume", out)
    assert result.returncode == 0, result.stderr
    assert {p: p.read_bytes() for p in finished} == finished
    rows = json.loads(paceline.main("compare", out, "--json").stdout)["rows"]
    assert {row["launcher"]: row["equivalent"] for row in rows} == {"local": True, "mpi": True}
    (killed,) = (out / "attempts").iterdir()
    assert killed.name.startswith("tiny.mpi.")
    kept = {p.parents[1].name.split(".")[1] for p in out.glob("trials/*/tensors/*.safetensors")}
    assert kept == {"local"}, "tensors are deleted after the comparison, but not the baseline's"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["spec_toml"] == spec.read_text(), "one spec, never changed"


def test_trial_that_exceeds_its_limit_ends_the_run_with_6(paceline, tmp_path):
    spec, out = tmp_path / "endless.toml", tmp_path / "run"
    spec.write_text(ENDLESS.replace("trial_s = 120", "trial_s = 5"))
    result = slowed(paceline)("run", spec, "--out", out)
    assert result.returncode == 6, result.stderr
    assert "5 s" in result.stderr
    assert "--resume" in result.stderr
    assert "Traceback" not in result.stderr
    assert alive(out) == {}
    (outcome,) = out.glob("trials/*/outcome.json")
    assert json.loads(outcome.read_text())["status"] == "timed_out"
