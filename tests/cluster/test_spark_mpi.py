"""Spark's tasks as one MPI job: a death ends all processes.

tests/functional/test_small_run.py checks that it trains the same as under mpirun.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cluster.killed import endless, kill_one, wait_for_step
from tests.support.commands import start_command

from paceline.base.host.processes import TOKEN_VARIABLE, command_line_of, parent_of, pids_with_token
from paceline.collectives.host import wait_until
from paceline.runner.launchers.base import launcher_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def dataset(tiny_dataset: Path) -> Path:
    return tiny_dataset


def above(pid: int, generations: int) -> int:
    """rank -> prterun -> Python of task 0 -> Spark's Python daemon -> JVM"""
    for _ in range(generations):
        parent = parent_of(pid)
        assert parent is not None
        pid = parent
    return pid


def test_death_of_task_0_ends_all_and_is_named(dataset: Path, tmp_path: Path, token: str) -> None:
    trial, files = endless("spark", dataset, tmp_path / "run", transport="mpi")

    def task_0() -> int:
        pid = wait_for_step(files, 1)
        assert "prterun" in command_line_of(above(pid, 1))[0]
        return above(pid, 2)

    killed = kill_one(trial, files, token, task_0)
    assert killed.took_s < 30
    assert (killed.outcome.status, killed.outcome.exit_code) == ("failed", 5)
    # the ranks were asked to end, as the log says
    line = "rank 0 of 2 failed: RankFailed: the Python of its barrier task was killed"
    assert line in files.launcher_log.read_text()


def test_nothing_outlives_a_killed_spark_submit(dataset: Path, tmp_path: Path, token: str) -> None:
    trial, files = endless("spark", dataset, tmp_path / "run", transport="mpi")
    command = launcher_for("spark").command(trial, files)
    environment = {**os.environ, **command.environment, TOKEN_VARIABLE: token}
    process = start_command(command.argv, files.launcher_log, env=environment)
    try:
        assert above(wait_for_step(files, 1), 4) == process.pid
    finally:
        process.kill()
        process.wait(timeout=10)
    assert wait_until(lambda: not pids_with_token(token), 15), pids_with_token(token)
