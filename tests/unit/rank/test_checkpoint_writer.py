"""The thread that writes checkpoints survives what it cannot write."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import PacelineWarning
from paceline.rank.checkpoints import CheckpointWriter
from paceline.records.checkpoints import CheckpointFolder
from paceline.training.state import RankState
from paceline.training.state_files import Position

LIMIT_S = 20.0


@pytest.fixture
def writer(tmp_path):
    made = CheckpointWriter(CheckpointFolder(tmp_path), 0, 1, tmp_path / "rows.jsonl")
    yield made
    made.close()


def write(writer, steps, tensor):
    state = RankState()
    state.add_whole("buffers/b", tensor)
    writer.begin(state, LIMIT_S)
    writer.end(Position(steps=steps, task_sha256="abc", replicas=1), None)
    assert writer.wait_until_idle(LIMIT_S)


def test_type_that_no_file_holds_costs_one_checkpoint_and_not_the_next(writer, tmp_path):
    with pytest.warns(PacelineWarning, match=r"no checkpoint: KeyError: torch\.complex64"):
        write(writer, 1, torch.zeros(3, dtype=torch.complex64))
    assert writer.is_idle
    assert CheckpointFolder(tmp_path).complete() == []
    write(writer, 2, torch.zeros(3))
    assert [c.steps for c in CheckpointFolder(tmp_path).complete()] == [2]


def test_writer_is_busy_from_the_end_of_the_copy_on(writer, monkeypatch):
    states = []
    monkeypatch.setattr(writer, "_write", lambda _job: states.append(writer.is_idle))
    write(writer, 1, torch.zeros(3))
    assert states == [False]
    assert writer.is_idle
