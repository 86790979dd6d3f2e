"""Failing replicas in real processes; their training: tests/contract/test_strategies.py."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
from tests.support.forking import LOADED_WITH
from tests.unit.train.strategies.own_training import SIZES, TRIALS, train, trial_of

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


def test_failing_process_ends_the_others_at_once(run_ranks):
    trial = trial_of(**TRIALS["processes-3"], task="", dropout=False, global_batch=12)
    ends = run_ranks(trial)
    # Waiting out their own limit would end the others with TimedOut.
    assert ends[1][0] == "ZeroDivisionError"
    assert [ends[0][0], ends[2][0]] == ["PeerLost", "PeerLost"]
    assert "local rank 1" in ends[0][1]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("processes-3", "shared_shards"),
        ("hybrid-2x2", "pipeline.links"),
        ("threads-3", "threads"),
    ],
)
def test_owners_are_the_first_to_write_their_shards(monkeypatch, name, module):
    """So the kernel takes the pages from their NUMA nodes. Zeros after the weights would show."""
    touched = {}

    def touch(shards, flat):
        assert not flat.any()
        touched[threading.get_ident()] = {(shard.name, shard.start) for shard in shards}

    monkeypatch.setattr(f"paceline.train.strategies.{module}.touch", touch)
    trial = trial_of(**TRIALS[name])
    workers = trial.placement.replicas_per_node * trial.placement.stages
    shards = set()

    def owned(strategy, *_):
        for shard in strategy._shards:
            shards.update((each.name, each.start) for each in shard.parameter_shards)

    train(trial, SIZES[:1], after_step=owned)
    assert len(touched) == workers
    assert sum(map(len, touched.values())) == len(shards)
    assert set.union(*touched.values()) == shards
