"""Transports over an interface: what their errors mean, and NCCL as far as it goes on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import EnvironmentLacks, PeerLost, TimedOut
from paceline.train.transports.network import GlooTransport, NcclTransport, SharedMemoryTransport


def test_time_out_of_a_library_says_whose_limit_it_was():
    error = GlooTransport().explain(RuntimeError("Timed out waiting 2000ms"))
    assert type(error) is TimedOut
    assert str(error) == (
        "rank 0: a collective of Gloo did not end within 0 s (limits.collective_s): a peer is "
        "blocked or gone. Gloo reports: Timed out waiting 2000ms"
    )


@pytest.mark.parametrize("text", ["Connection closed by peer", "Connection reset by peer"])
def test_closed_connection_is_a_lost_peer(text):
    error = GlooTransport().explain(RuntimeError(f"{text}\nframe: timeout"))
    assert type(error) is PeerLost
    assert str(error).endswith(f"Gloo reports: {text}")


def test_other_words_mean_nothing():
    assert GlooTransport().explain(RuntimeError("out of memory")) is None


# As ProcessGroupNCCL.cpp and NCCLUtils.hpp of torch 2 write them.
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=2000) ran for 2001 milliseconds before timing out."
)
REMOTE = (
    "NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error, "
    "NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a "
    "remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote "
    "peer alpha<40000>"
)
DUPLICATE = (
    "NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL "
    "version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (WATCHDOG, TimedOut, "before timing out"),
        (REMOTE, PeerLost, "Connection closed by remote peer alpha"),
        ("NCCL communicator was aborted on rank 0.", PeerLost, "aborted"),
        (DUPLICATE, EnvironmentLacks, "rank 1 and rank 0 both on CUDA device"),
    ],
)
def test_errors_are_told_as_what_they_mean(text, kind, said):
    meaning = NcclTransport().explain(RuntimeError(text))
    assert type(meaning) is kind
    assert said in str(meaning)


def test_error_of_another_kind_keeps_its_own_words():
    assert NcclTransport().explain(RuntimeError("CUDA out of memory")) is None


def test_closing_what_was_never_opened_is_harmless():
    NcclTransport().close(failed=False)
    NcclTransport().close(failed=True)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_torch_without_nccl_is_told_with_what_to_install(make_trial, solo):
    with pytest.raises(EnvironmentLacks, match=r"built without; install .*CUDA build.*gloo"):
        NcclTransport().open(solo, make_trial(), dist.HashStore())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("failed", [False, True])
def test_tensors_of_a_gpu_are_reduced_and_the_group_is_closed(make_trial, solo, failed):
    trial = make_trial().model_copy(update={"device": "cuda", "transport": "nccl"})
    transport = NcclTransport()
    transport.open(solo, trial, dist.HashStore())
    try:
        ones = torch.ones(3, device="cuda")
        dist.all_reduce(ones)
        assert ones.tolist() == [1.0, 1.0, 1.0]
        assert transport.describe()["library"].startswith("nccl ")
    finally:
        transport.close(failed=failed)
    assert not dist.is_initialized()


def test_back_end_without_shared_memory_says_why():
    import paceline.distributed

    store = dist.HashStore()
    dist.init_process_group(paceline.distributed.BACKEND, store=store, rank=0, world_size=1)
    try:
        transport = SharedMemoryTransport()
        transport._group = dist.group.WORLD
        assert transport.describe()["not_shared"] == "each rank is on a host of its own"
    finally:
        dist.destroy_process_group()
