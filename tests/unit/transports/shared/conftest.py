from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PROGRAM = "tests.unit.transports.shared.rank_program"


@pytest.fixture
def start_ranks(tmp_path):
    """Starts the ranks of a case of `rank_program`; they are ended with the test."""
    started = []

    def start(case, ranks):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        for rank in range(ranks):
            command = [sys.executable, "-m", PROGRAM, case, str(rank), str(ranks), str(tmp_path)]
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
            )
        return started

    yield start
    for process in started:
        with process:  # waits for it and closes its pipe
            process.kill()


@pytest.fixture
def run_ranks(start_ranks):
    """Runs a case; returns what each rank printed, None for one that was killed."""

    def run(case, ranks):
        outputs = [process.communicate()[0] for process in start_ranks(case, ranks)]
        return [json.loads(output) if output else None for output in outputs]

    return run
