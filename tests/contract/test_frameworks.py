"""Frameworks train over back end "paceline" as docs/reference/back-ends.md says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.commands import run_command

pytestmark = pytest.mark.contract

PROGRAM = Path(__file__).parent / "programs/frameworks.py"
FRAMEWORKS = ("accelerate", "transformers", "lightning")
LIMIT_S = 200.0


@pytest.mark.parametrize(
    "framework", [pytest.param(each, marks=pytest.mark.needs(each)) for each in FRAMEWORKS]
)
def test_ranks_with_different_samples_get_the_same_weights(framework, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = run_command(
        [*torchrun, "--nproc-per-node", 2, PROGRAM, framework, tmp_path], LIMIT_S, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["group"] == second["group"] == "SharedMemoryGroup"
    assert first["before"] != first["after"] == second["after"]
