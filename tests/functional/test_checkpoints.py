"""Ranks are killed: the trial continues from its last checkpoint."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.functional.cli_runs import NO_SIDECAR, cli_in, slowed, small, trial
from tests.support.waiting import pid_after_steps

from paceline.measure.records.files import read_jsonl

pytestmark = [pytest.mark.functional, pytest.mark.timeout(500)]

# Ranks of `local` are started again by the same code as those of `mpi`.
LAUNCHERS = {"mpi": "mpi", "torchrun": "gloo", "spark": "gloo"}
STEPS, EVERY, KILLED_AFTER = 30, 4, 9


@pytest.fixture(scope="module")
def run_with_kills(cache, tmp_path_factory, tiny_dataset):
    """A run in which rank 1 of each trial with two ranks was killed once."""
    folder = tmp_path_factory.mktemp("recovered")
    out, log, spec = folder / "run", folder / "log.txt", folder / "spec.toml"
    text = small(tiny_dataset, max_steps=STEPS, epochs=100, image_size=64).replace(*NO_SIDECAR)
    trials = "".join(trial(*each) for each in LAUNCHERS.items())
    spec.write_text(f"restarts = 2\n{text}[checkpoint]\nevery_steps = {EVERY}\n{trials}")
    # The steps sleep, so that rank 1 is killed long before its last step on any machine.
    process = slowed(cli_in(cache, folder)).start("run", spec, "--out", out, log=log)
    killed: set[str] = set()
    deadline = time.monotonic() + 400
    while process.poll() is None and time.monotonic() < deadline:
        for folder in out.glob("trials/tiny.*.processes.*"):
            pid = None
            if folder.name not in killed and not (folder / "outcome.json").exists():
                pid = pid_after_steps(folder / "ranks/1", KILLED_AFTER)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.add(folder.name)
        time.sleep(0.02)
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=30)
    assert process.returncode == 0, log.read_text()
    assert len(killed) == len(LAUNCHERS)
    return out


def folder_of(run_dir: Path, launcher: str) -> Path:
    (found,) = run_dir.glob(f"trials/tiny.{launcher}.*.processes.*")
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_trial_continues_from_its_last_checkpoint(run_with_kills, launcher):
    folder = folder_of(run_with_kills, launcher)
    assert json.loads((folder / "outcome.json").read_text())["status"] == "ok"
    for rank in range(2):
        (row,) = read_jsonl(folder / "ranks" / str(rank) / "continuations.jsonl")
        assert row["resumed_steps"] % EVERY == 0
        assert row["resumed_steps"] > 0
        # The step that was killed, and the checkpoint that was being written.
        assert row["before_steps"] - row["resumed_steps"] <= 2 * EVERY
        assert row["restored_unix_s"] > row["process_started_unix_s"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_training_with_a_failure_is_equivalent_to_the_baseline(run_with_kills, launcher):
    found = json.loads((folder_of(run_with_kills, launcher) / "equivalence.json").read_text())
    assert found["equivalent"] is True
    log = next(check for check in found["checks"] if check["name"] == "sample_log")
    assert log["passed"] is True
    assert log["reason"].startswith(f"{STEPS} steps")


def test_finished_trials_leave_no_checkpoint(run_with_kills):
    assert not list(run_with_kills.rglob("checkpoints"))
    assert not list(run_with_kills.rglob("*.part"))
