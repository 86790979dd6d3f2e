from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paceline.collectives.buffers import reduce_in_order, reduction_of

# 1e16 + 1 - 1e16 depends on the order in float64
PARTS = [np.array([1e16, 3.0]), np.array([1.0, 1e16]), np.array([-1e16, -1e16]), np.array([5.0, 1])]


@pytest.mark.parametrize("rank", range(4))
def test_order_is_that_of_the_ranks_whoever_computes(rank):
    own = PARTS[rank].copy()
    others = {peer: PARTS[peer].copy() for peer in range(4) if peer != rank}
    # in any order of arrival
    reduce_in_order(own, rank, dict(reversed(others.items())), np.add)
    expected = ((PARTS[0] + PARTS[1]) + PARTS[2]) + PARTS[3]
    assert own.tobytes() == expected.tobytes()


def test_zeros_of_both_signs_come_out_alike_on_both_ranks():
    zeros = [np.array([0.0, -0.0]), np.array([-0.0, 0.0])]
    results = []
    for rank in range(2):
        own = zeros[rank].copy()
        reduce_in_order(own, rank, {1 - rank: zeros[1 - rank].copy()}, np.minimum)
        results.append(own.tobytes())
    assert results[0] == results[1]


def test_types_that_neither_mpi_nor_numpy_has_are_refused():
    with pytest.raises(ValueError, match=r"no reduction SUM for torch\.float8"):
        reduction_of(dist.ReduceOp.SUM, torch.float8_e4m3fn)
    for dtype in (torch.float16, torch.bfloat16, torch.int8):
        assert reduction_of(dist.ReduceOp.MAX, dtype).factor is None
    with pytest.raises(ValueError, match=r"no reduction BXOR for torch\.float16"):
        reduction_of(dist.ReduceOp.BXOR, torch.float16)
