from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.base.torch_internals import HashStore
from paceline.train.transports.bucket_sums import FlatBucket, pack


@pytest.fixture
def alone():
    """A group of one rank: what is lost there is lost everywhere, and nobody makes up for it."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_bucket():
    """A bucket of gradients, as a step would have it."""

    def make(gradients, index=0, last=True) -> FlatBucket:
        (bucket,) = pack([tuple(g.shape) for g in gradients], float("inf"), torch.device("cpu"))
        bucket._index, bucket._last = index, last
        bucket.fill(gradients)
        return bucket

    return make


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(20, 30, generator=generator), torch.randn(20, generator=generator)]
