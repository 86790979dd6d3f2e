from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support.forking import LOADED_WITH, PYTHON_PATH

ROOT = Path(__file__).parents[4]
PROGRAM = Path(__file__).with_name("rank_program.py")


@pytest.fixture
def start_ranks(forks, tmp_path):
    """Starts the ranks of a case of `rank_program`; they are ended with the test.

    python: the words in front of the program. A fork ends after its client has been killed, not
    before; where that matters, start interpreters.
    """
    started = []

    def start(case, ranks, python=forks.python):
        environment = {**os.environ, **LOADED_WITH, "PYTHONPATH": PYTHON_PATH}
        for rank in range(ranks):
            command = [*python, str(PROGRAM), case, str(rank), str(ranks), str(tmp_path)]
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
