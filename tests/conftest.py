"""What holds for all tests."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def runtime_of_our_own(tmp_path_factory):
    """Tests kill sidecars and count them: those of other runs on this machine are left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield os.environ["PACELINE_RUNTIME_DIR"]
