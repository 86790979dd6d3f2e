from __future__ import annotations

import fcntl
import os

import pytest
from tests.environment import is_kept
from tests.functional.cli_runs import SMALL, Cli


@pytest.fixture(scope="session")
def cache(shared_cache):
    """PACELINE_CACHE of what the tests run."""
    return shared_cache


def cli(cache, folder):
    environment = {
        **{k: v for k, v in os.environ.items() if is_kept(k)},
        "PACELINE_CACHE": str(cache),
        "COLUMNS": "80",
        "NO_COLOR": "1",
    }
    return Cli(environment=environment, cwd=folder)


@pytest.fixture
def paceline(cache, tmp_path):
    return cli(cache, tmp_path)


@pytest.fixture(scope="session")
def small_run(cache, shared_folder):
    """Return the directory of a finished run of SMALL alone. Read only."""
    folder = shared_folder / "small-run"
    with (shared_folder / "small-run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker runs it, others wait
        if not (folder / "finished").exists():
            folder.mkdir()
            (folder / "small.toml").write_text(SMALL, "utf-8")
            result = cli(cache, folder)("run", "small.toml", "--out", folder / "run")
            assert result.returncode == 0, result.stderr
            (folder / "finished").touch()
    return folder / "run"
