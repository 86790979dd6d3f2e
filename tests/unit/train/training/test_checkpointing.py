from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from paceline.train.training.checkpointing import BlockBytes, choose_segments, stored_bytes
from paceline.train.training.task import Task, TaskSettings
from paceline.train.workloads.build import build_model, make_task


def peak(blocks, begins, in_flight=1):
    """Memory by the definition: inputs of the segments in flight, and the largest segment."""
    ends = [*begins[1:], len(blocks)]
    inputs = sum(blocks[begin].inputs for begin in begins[1:])
    largest = max(
        sum(b.stored for b in blocks[low:high]) for low, high in zip(begins, ends, strict=True)
    )
    return in_flight * inputs + largest


BLOCKS = [BlockBytes(i, s) for i, s in [(3, 9), (5, 1), (1, 6), (4, 7), (2, 2), (6, 8), (1, 3)]]


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_no_other_segments_need_less_memory(in_flight):
    legal = [True, True, True, False, True, True, True]
    found = choose_segments(BLOCKS, legal, in_flight)
    places = [i for i in range(1, len(BLOCKS)) if legal[i]]
    all_begins = [
        [0, *chosen]
        for count in range(len(places) + 1)
        for chosen in itertools.combinations(places, count)
    ]
    least = min(peak(BLOCKS, begins, in_flight) for begins in all_begins)
    assert found[0] == 0
    assert not set(found) - {0, *places}
    assert peak(BLOCKS, found, in_flight) <= 1.2 * least


def test_equal_blocks_give_about_the_square_root_of_their_number():
    found = choose_segments([BlockBytes(1, 1)] * 16, [True] * 16)
    assert found == [0, 4, 8, 12]
    assert choose_segments([BlockBytes(1, 9)] * 2, [True] * 2) == [0, 1]  # 10 bytes, not 18
    assert choose_segments([BlockBytes(9, 1)] * 2, [True] * 2) == [0]  # 2 bytes, not 10


class Inputs(Task):
    """Linear layers store their inputs, a ReLU in place its output."""

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.Tanh())

    def example_input(self):
        return torch.zeros(1, 6)


def test_stored_bytes_are_those_of_autograd():
    task = Inputs(TaskSettings())
    model = build_model(task)
    found = stored_bytes(task, task.blocks(model))
    # float32 of two samples: the input; the output of the ReLU; that of the first layer is the same
    # memory; the last layer's output
    assert found == [BlockBytes(48, 48), BlockBytes(64, 64), BlockBytes(64, 0), BlockBytes(32, 32)]


def test_looking_at_a_model_changes_nothing():
    task = make_task("tests.unit.train.strategies.own_models:PlainResNetTask", classes=3)
    model = build_model(task)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = stored_bytes(task, task.blocks(model))
    assert len({block.stored for block in found}) > 1
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert model.dropout._keys is None
