"""`paceline watch -- COMMAND` records a training with its own launcher, and does not change it."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path

import polars as pl
import pytest
from tests.functional.cli_runs import LIMIT_S
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

DDP = Path(__file__).parents[2] / "examples/scripts/ddp.py"
# Its worker is a new Python process, which imports torch and the script.
ALONE = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.ones(20, 8))
    for (inputs,) in DataLoader(data, 2, num_workers=1, multiprocessing_context="spawn"):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    sys.exit(3)
"""
ENDLESS = """
import time
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)  # few steps, so that their records stay small on a slow machine
"""


def torchrun(folder: Path) -> list[str | Path]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'rendezvous'}",
        "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1",
    ]  # fmt: skip


def outcome_of(run: Path) -> dict:
    [path] = run.glob("trials/*/outcome.json")
    return json.loads(path.read_text("utf-8"))


def test_torchrun_is_recorded_without_a_change(paceline, tmp_path):
    ended = paceline("watch", "--out", "run", "--", *torchrun(tmp_path), DDP, "--epochs", "2")
    assert ended.returncode == 0, ended.stderr
    assert "epoch 1: loss" in ended.stdout  # of the script
    assert "32 steps on 2 ranks (torchrun, gloo): " in ended.stdout
    assert "waiting for the slowest rank" in " ".join(ended.stdout.replace("│", " ").split())
    assert (tmp_path / "run/report.html").exists()
    [trial] = (tmp_path / "run/trials").iterdir()
    assert sorted(path.name for path in (trial / "ranks").iterdir()) == ["0", "1"]
    for rank in ("0", "1"):
        steps = pl.read_parquet(trial / "ranks" / rank / "steps.parquet")
        assert (len(steps), steps["samples"].unique().to_list()) == (32, [32])
        operations = pl.read_parquet(trial / "ranks" / rank / "communication.parquet")
        assert "allreduce" in operations["operation"].to_list()
    assert list((trial / "hosts").glob("*/trace.*"))


def test_one_process_ends_with_its_own_code_and_keeps_its_sitecustomize(paceline, tmp_path):
    (tmp_path / "alone.py").write_text(ALONE, "utf-8")
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own sitecustomize')\n", "utf-8")
    environment = {**paceline.environment, "PYTHONPATH": str(own)}
    cli = dataclasses.replace(paceline, environment=environment)
    ended = cli("watch", "--out", "run", "--", sys.executable, "alone.py")
    assert ended.returncode == 3, ended.stderr
    # the command's Python, the worker of the loader and the tracker of its resources
    assert ended.stdout.count("own sitecustomize") >= 2
    assert outcome_of(tmp_path / "run")["message"] == "the command ended with exit status 3"
    [trial] = (tmp_path / "run/trials").iterdir()
    assert [path.name for path in (trial / "ranks").iterdir()] == ["0"]
    lines = (trial / "ranks/0/steps.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(10))


def test_ctrl_c_reaches_the_command_and_what_it_did_is_shown(paceline, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS, "utf-8")
    log = tmp_path / "log.txt"
    watched = paceline.start("watch", "--out", "run", "--", sys.executable, "endless.py", log=log)
    try:
        steps = tmp_path / "run/trials/endless.r0/ranks/0/steps.jsonl"
        wait_for(
            lambda: steps.exists() and steps.read_text("utf-8").count("\n") > 8,
            LIMIT_S, "steps", watched,
        )  # fmt: skip
        watched.send_signal(signal.SIGINT)
        assert watched.wait(timeout=LIMIT_S) == 130, log.read_text("utf-8")
    finally:
        watched.kill()
        watched.wait()
    text = log.read_text("utf-8")
    assert "KeyboardInterrupt" in text
    assert "steps on 1 rank (local): " in text
    assert outcome_of(tmp_path / "run")["status"] == "ok"


def test_a_command_that_does_not_train_leaves_no_run(paceline, tmp_path):
    ended = paceline("watch", "--out", "run", "--", sys.executable, "-c", "print('hello')")
    assert (ended.returncode, ended.stdout) == (0, "hello\n")
    assert "nothing was recorded" in ended.stderr
    assert not (tmp_path / "run/manifest.json").exists()
