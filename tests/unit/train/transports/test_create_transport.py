from __future__ import annotations

import pytest

from paceline.train.transports import create_transport


def asking(make_trial, transport, ranks=2, device="cpu"):
    return make_trial(ranks=ranks).model_copy(update={"transport": transport, "device": device})


def test_single_rank_needs_no_process_group(make_trial):
    assert create_transport(asking(make_trial, "none", ranks=1)) is None


def test_ranks_that_share_memory_need_no_process_group(make_trial):
    assert create_transport(asking(make_trial, "shared")) is None


@pytest.mark.parametrize(
    ("transport", "device", "implementation"),
    [
        ("gloo", "cpu", "GlooTransport"),
        ("mpi", "cpu", "MpiTransport"),
        ("nccl", "cuda", "NcclTransport"),
        ("gloo", "cuda", "GlooTransport"),
    ],
)
def test_transport_is_the_one_asked_for(make_trial, transport, device, implementation):
    created = create_transport(asking(make_trial, transport, device=device))
    assert type(created).__name__ == implementation
