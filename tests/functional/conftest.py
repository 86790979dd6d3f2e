from __future__ import annotations

import os

import pytest
from tests.environment import is_kept
from tests.functional.cli_runs import Cli


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def paceline(cache, tmp_path):
    environment = {
        **{k: v for k, v in os.environ.items() if is_kept(k)},
        "PACELINE_CACHE": str(cache),
        "COLUMNS": "80",
        "NO_COLOR": "1",
    }
    return Cli(environment=environment, cwd=tmp_path)
