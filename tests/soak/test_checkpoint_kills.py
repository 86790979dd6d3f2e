"""SIGKILL at random times while checkpoints are written: complete ones can always be loaded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.soak import checkpoint_kills
from tests.support.commands import run_command

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

KILLS = 200


def test_training_survives_kills_at_any_moment(tmp_path: Path) -> None:
    program = checkpoint_kills.__file__
    command = [sys.executable, program, tmp_path / "kills", KILLS, 1]
    result = run_command(command, 1700, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "kills" / "kills.json").read_text())
    assert len(found["kills"]) == KILLS
    assert found["trainings"] >= 1
    # The next checkpoint waits for the one before, so at most two intervals are at stake.
    assert found["most_lost"] < 2 * found["every_steps"] + 1
