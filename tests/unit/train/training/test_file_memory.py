"""Tensors in a temporary file: equal to those in memory, and not counted as memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.train.training.file_memory import FileMemory
from paceline.train.training.tensors import sha256_of
from paceline.train.workloads.build import build_model, make_task

LARGE = (1 << 18,)  # 1 MiB of float32


def mapped_files():
    """The bytes of this process that are pages of files."""
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found.group(1))


def is_in_a_file(tensor):
    """Whether a map of a file without a name contains the tensor."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return line.endswith("(deleted)")
    return False


def test_model_that_is_drawn_in_a_file_has_equal_weights():
    task = make_task("gpt-small", seed=5)
    plain = build_model(task)
    with FileMemory().for_new_tensors():
        model = build_model(task)
    assert sha256_of(model.state_dict()) == sha256_of(plain.state_dict())
    large = [p for p in model.parameters() if p.nbytes >= 1 << 16]
    assert len(large) > 4
    assert all(map(is_in_a_file, large))


def test_pages_leave_the_process_and_keep_their_content():
    memory, values = FileMemory(), torch.arange(64 * LARGE[0], dtype=torch.float32)
    before = mapped_files()
    copy = memory.copy_of(values)
    assert mapped_files() - before < values.nbytes / 4
    assert torch.equal(copy, values)
    assert mapped_files() - before > values.nbytes / 2
    memory.release(copy)
    assert mapped_files() - before < values.nbytes / 4
    assert torch.equal(copy, values)


def test_views_and_changes_in_place_stay_those_of_one_tensor():
    with FileMemory().for_new_tensors():
        whole = torch.zeros(LARGE)
        whole.view(2, -1)[1].fill_(3.0)
        changed = whole.add_(1.0)
    assert changed is whole
    assert is_in_a_file(whole)
    assert whole[[0, -1]].tolist() == [1.0, 4.0]


def test_transposed_result_keeps_its_strides():
    given = torch.randn(512, 512)
    with FileMemory().for_new_tensors():
        found = given.clone().t() + 0
    assert torch.equal(found, given.t())
    assert found.stride() == (given.t() + 0).stride()


def test_small_tensors_and_those_that_existed_stay_in_memory():
    existed = torch.zeros(LARGE)
    with FileMemory().for_new_tensors():
        small = torch.zeros(4)
        same = existed.mul_(2)
    assert not is_in_a_file(small)
    assert not is_in_a_file(same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_each_type_is_copied(dtype):
    values = torch.arange(1 << 17).remainder(2).to(dtype)
    assert torch.equal(FileMemory().copy_of(values), values)


def test_tensors_that_end_within_a_page_do_not_overlap():
    memory, given = FileMemory(), [torch.full((70_001,), value) for value in (1.0, 2.0, 3.0)]
    copies = [memory.copy_of(each) for each in given]
    assert all(map(torch.equal, copies, given))


def test_tied_weights_stay_tied():
    with FileMemory().for_new_tensors():
        first, last = nn.Linear(256, 256), nn.Linear(256, 256)
        last.weight = first.weight
        nn.init.ones_(first.weight)
    assert last.weight is first.weight
    assert last.weight.sum() == 256 * 256
