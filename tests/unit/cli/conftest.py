"""Run `paceline` in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.base.errors import ExitCode
from paceline.cli import main


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command, which has to end well, and return what it prints."""

    def run(*words: object) -> str:
        assert main([str(word) for word in words]) == ExitCode.OK
        return capsys.readouterr().out

    return run
