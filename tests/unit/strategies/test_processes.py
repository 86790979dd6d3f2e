"""Failing replicas in real processes; their training: tests/contract/test_strategies.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support.forking import LOADED_WITH

PROGRAM = Path(__file__).with_name("processes_program.py")
END_S = 60
RANKS = 3


@pytest.fixture
def run_ranks(forks, tmp_path):
    """Trains on several processes of one node; returns the printed JSON of each."""
    started = []

    def run(trial):
        (tmp_path / "trial.json").write_text(trial.model_dump_json())
        for rank in range(RANKS):
            command = [*forks.python, PROGRAM, str(rank), str(RANKS), tmp_path]
            environment = {**os.environ, **LOADED_WITH}
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
        return [json.loads(process.communicate(timeout=END_S)[0]) for process in started]

    yield run
    for process in started:
        with process:
            process.kill()


def test_failing_process_ends_the_others_at_once(make_strategy_trial, run_ranks):
    trial = make_strategy_trial("processes", 1)
    counts = {"ranks_per_node": RANKS, "replicas_per_node": RANKS}
    placement = trial.placement.model_copy(update=counts)
    ends = run_ranks(trial.model_copy(update={"transport": "shared", "placement": placement}))
    # Waiting out their own limit would end the others with TimedOut.
    assert ends[1][0] == "ZeroDivisionError"
    assert [ends[0][0], ends[2][0]] == ["PeerLost", "PeerLost"]
    assert "local rank 1" in ends[0][1]
