"""The memory of another rank that a rank maps, and the order in which values are reduced."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.collectives import in_place
from paceline.collectives.buffers import reduction_of

_ReduceOp = torch.distributed.ReduceOp


def described(tensor: torch.Tensor) -> str:
    record = in_place._described(tensor)
    assert record
    return record


def test_the_memory_of_a_shared_tensor_can_be_read_but_not_written():
    tensor = torch.arange(in_place.LEAST_BYTES // 4, dtype=torch.float32)
    view = tensor[5:]
    found = in_place._opened(described(tensor), tensor.nbytes)
    assert found is not None
    view[0] = -1.0
    assert np.array_equal(found.view(np.float32), tensor.numpy())
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_a_file_that_is_not_what_was_described_is_not_mapped(tmp_path: Path):
    tensor = torch.zeros(in_place.LEAST_BYTES // 4)
    path, *numbers = described(tensor).split()
    file = tmp_path / "torch_1"
    file.write_bytes(bytes(tensor.nbytes))
    with file.open("r+b") as other:
        status = os.fstat(other.fileno())
        own = f"/proc/{os.getpid()}/fd/{other.fileno()}"
        place = f"{status.st_dev} {status.st_ino} {status.st_size} 0"
        wrong = [
            f"{own} {place}",
            f"{file} {place}",
            " ".join([path, "0", *numbers[1:]]),
            " ".join([path, *numbers[:3], "4"]),
            f"/proc/{2**22 + 1}/fd/3 {place}",
            "",
            "x",
        ]
        assert [in_place._opened(record, tensor.nbytes) for record in wrong] == [None] * len(wrong)


def test_small_and_strided_tensors_are_not_shared():
    assert in_place._described(torch.zeros(10)) == ""
    assert in_place._described(torch.zeros(in_place.LEAST_BYTES // 2)[::2]) == ""


@pytest.mark.parametrize("own", [0, 1, 2])
def test_contributions_are_reduced_in_the_order_of_the_ranks(own: int):
    # In another order the small one would be lost.
    blocks = [np.full(4, value, np.float32) for value in (1e8, -1e8, 0.5)]
    before = [block.copy() for block in blocks]
    reduction = reduction_of(_ReduceOp.AVG, torch.float32)
    in_place._reduce_block(blocks, blocks[own], reduction)
    assert blocks[own].tolist() == [np.float32(0.5 / 3)] * 4
    for rank in {0, 1, 2} - {own}:
        assert np.array_equal(blocks[rank], before[rank])
