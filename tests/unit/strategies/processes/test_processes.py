"""Replicas in real processes; more setups, several nodes too: tests/contract/test_strategies.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.forking import LOADED_WITH

TOLERANCE = 1e-4  # as in tests/contract/test_strategies.py
SIZES = [12, 7, 1, 5] * 5  # even, uneven, and some ranks with nothing
PROGRAM = Path(__file__).with_name("processes_program.py")
END_S = 60


@pytest.fixture
def run_ranks(forks, tmp_path, make_batch):
    """Trains on several processes of one node; the printed JSON of each, and when each ended."""
    started = []

    def run(trial, ranks, *, failing_rank=None, fail_at=None):
        whole = make_batch(0, 40, trial.training)
        data = {"images": whole.inputs.contiguous(), "labels": whole.targets}
        save_file(data, tmp_path / "data.safetensors")
        job = {
            "trial": trial.model_dump(mode="json"), "sizes": SIZES, "failing_rank": failing_rank,
            "fail_at": fail_at,
        }  # fmt: skip
        (tmp_path / "job.json").write_text(json.dumps(job))
        environment = {**os.environ, **LOADED_WITH}
        for rank in range(ranks):
            command = [*forks.python, PROGRAM, str(rank), str(ranks), tmp_path]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
        return [json.loads(process.communicate(timeout=END_S)[0]) for process in started]

    yield run
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def make_processes_trial(make_strategy_trial):
    def make(ranks, **training):
        trial = make_strategy_trial("processes", 1, **training)
        counts = {"ranks_per_node": ranks, "replicas_per_node": ranks}
        place = trial.placement.model_copy(update=counts)
        return trial.model_copy(update={"transport": "shared", "placement": place})

    return make


@pytest.fixture
def judge(make_batch, train_by_hand, build, difference):
    """Differences of a rank's gradients and weights from the sequential ones."""

    def compare(training, left):
        batches = [make_batch(n, size, training) for n, size in enumerate(SIZES)]
        gradients, weights = train_by_hand(training, batches)
        return (
            difference({n: left[f"gradients/{n}"] for n in gradients}, gradients),
            difference(
                {n: left[f"weights/{n}"] for n in weights}, weights, build(training).state_dict()
            ),
        )

    return compare


def test_training_is_the_sequential_one(make_processes_trial, run_ranks, judge, tmp_path):
    ranks = 3
    trial = make_processes_trial(ranks, dropout=True, memory_format="channels_last")
    described = run_ranks(trial, ranks)
    first, *others = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(ranks)]
    gradients, weights = judge(trial.training, first)
    assert gradients < TOLERANCE
    assert weights < TOLERANCE
    names = [name for name in first if name.startswith("weights/")]
    assert all(torch.equal(other[name], first[name]) for other in others for name in names)
    slices = described[0]["shard_bytes"]
    assert len(slices) == ranks
    assert sum(slices) == 4 * sum(first[name].numel() for name in names)


def test_failing_process_ends_the_others_at_once(make_processes_trial, run_ranks):
    # Waiting out their own limit would end the others with TimedOut.
    ends = run_ranks(make_processes_trial(3), 3, failing_rank=1, fail_at=2)
    assert ends[1][0] == "ZeroDivisionError"
    assert [ends[0][0], ends[2][0]] == ["PeerLost", "PeerLost"]
    assert "local rank 1" in ends[0][1]
