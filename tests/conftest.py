"""What holds for all tests, and what they share: to make a data set takes long."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.environment import QUICK_JVM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def runtime_of_our_own(tmp_path_factory):
    """Tests kill sidecars and count them: those of other runs on this machine are left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield os.environ["PACELINE_RUNTIME_DIR"]


@pytest.fixture(scope="session", autouse=True)
def _quick_jvm() -> Iterator[None]:
    """Of every Spark that tests start, but where they choose its variables themselves."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, flags in QUICK_JVM.items():
            patch.setenv(variable, f"{os.environ.get(variable, '')} {flags}".lstrip())
        yield


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PACELINE_CACHE of these tests: each data set in it is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_dataset(shared_cache: Path) -> Path:
    """48 photos through Spark; what `images = 48` and `seed = 3` in a spec name, too. Read only."""
    from paceline.data.catalogue import ensure_dataset

    return ensure_dataset("tiny", images=48, seed=3, cache_dir=shared_cache)
