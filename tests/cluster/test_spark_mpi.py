"""Spark's tasks as one MPI job: a death ends all processes.

tests/functional/test_small_run.py checks that it trains the same as under mpirun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.job_specs import NO_SIDECAR, job_words

from paceline.host.processes import (
    TOKEN_VARIABLE,
    command_line_of,
    parent_of,
    pids_with_token,
    send,
    wait_until,
)
from paceline.job.job import parse_job
from paceline.launchers import supervise as supervise_module
from paceline.launchers.base import launcher_for
from paceline.launchers.diagnosis import diagnose
from paceline.launchers.supervise import supervise

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def dataset(tiny_dataset: Path) -> Path:
    return tiny_dataset


@pytest.fixture
def token() -> Iterator[str]:
    """Marks what a test starts; nothing that carries it is left."""
    made = f"test{os.getpid()}{time.monotonic_ns()}"
    yield made
    wait_until(lambda: not pids_with_token(made), 10)
    left = {pid: command_line_of(pid) for pid in pids_with_token(made)}
    send(left, signal.SIGKILL)
    assert left == {}


def endless(dataset: Path, out: Path) -> tuple[Trial, TrialFiles]:
    """A trial that somebody has to end."""
    words = job_words(
        out.parent, "spark", ranks_per_node=2, transport="mpi", oversubscribe=True, data=dataset,
        global_batch=16, image_size=32, max_steps=100_000, epochs=100_000, telemetry=NO_SIDECAR,
    )  # fmt: skip
    job = parse_job("spark", "test", [*words, "--out", str(out)])
    job.files.root.mkdir(parents=True)
    job.files.trial.write_text(job.trial.model_dump_json())
    return job.trial, job.files


def wait_for_step(files: TrialFiles, rank: int) -> int:
    """Until a rank trains; its pid."""
    steps, deadline = files.rank(rank).steps, time.monotonic() + 90
    while not (steps.exists() and steps.stat().st_size > 0):
        assert time.monotonic() < deadline, files.launcher_log.read_text()
        time.sleep(0.05)
    pid: int = json.loads(files.rank(rank).status.read_text())["pid"]
    return pid


def above(pid: int, generations: int) -> int:
    """rank -> prterun -> Python of task 0 -> Spark's Python daemon -> JVM"""
    for _ in range(generations):
        parent = parent_of(pid)
        assert parent is not None
        pid = parent
    return pid


@pytest.mark.parametrize("victim", ["rank", "task 0"])
def test_death_of_one_ends_all_and_is_named(
    victim: str, dataset: Path, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise_module.secrets, "token_hex", lambda _n: token)
    trial, files = endless(dataset, tmp_path / "run")
    launcher = launcher_for("spark")
    launcher.preflight(trial)
    killed_s = []

    def kill(_launcher: int) -> None:
        pid = wait_for_step(files, 1)
        assert "prterun" in command_line_of(above(pid, 1))[0]
        os.kill(pid if victim == "rank" else above(pid, 2), signal.SIGKILL)
        killed_s.append(time.monotonic())

    ended = supervise(launcher.command(trial, files), files, limit_s=90, on_started=kill)
    assert time.monotonic() - killed_s[0] < 30
    assert ended.left_behind == ()
    assert not pids_with_token(token)
    outcome = diagnose(trial, files, ended, launcher)
    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    if victim == "rank":
        assert outcome.failed_rank == 1, outcome.message
    else:  # the ranks were asked to end, as the log says
        line = "rank 0 of 2 failed: RankFailed: the Python of its barrier task was killed"
        assert line in files.launcher_log.read_text()


def test_nothing_outlives_a_killed_spark_submit(dataset: Path, tmp_path: Path, token: str) -> None:
    trial, files = endless(dataset, tmp_path / "run")
    command = launcher_for("spark").command(trial, files)
    with files.launcher_log.open("wb") as log:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.environment, TOKEN_VARIABLE: token},
            stdout=log,
            stderr=log,
        )
    try:
        assert above(wait_for_step(files, 1), 4) == process.pid
    finally:
        process.kill()
        process.wait(timeout=10)
    assert wait_until(lambda: not pids_with_token(token), 15), pids_with_token(token)
