from __future__ import annotations

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
def small_run(cache, tmp_path_factory):
    """Directory of a finished run of SMALL alone: to be looked at, or copied to be changed."""
    folder = tmp_path_factory.mktemp("small-run")
    spec, out = folder / "small.toml", folder / "run"
    spec.write_text(SMALL, "utf-8")
    result = cli(cache, folder)("run", spec, "--out", out)
    assert result.returncode == 0, result.stderr
    return out
