"""Each name of torch's stores and groups without a stable interface exists and behaves as used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed import HashStore

import paceline.distributed  # noqa: F401  (registers the back end)
from paceline.base.errors import UsageError
from paceline.collectives import gloo_group, torch_internals
from paceline.collectives.torch_internals import PrefixStore

LIMIT = timedelta(seconds=30)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Methods of a process group that torch 2.9 does not have, or not yet torch 2.13.
NEW_METHODS = {
    "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "gather_into_tensor",
    "gather_single", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reconfigure",
    "get_reconfigure_handle", "register_pre_hook", "register_post_hook", "register_abort_hook",
    "unregister_pre_hook", "unregister_post_hook", "unregister_abort_hook", "new_window",
    "_add_ephemeral_timeout",
}  # fmt: skip


def test_prefixes_separate_the_keys_of_a_store() -> None:
    store = HashStore()
    PrefixStore("one", store).set("key", "1")
    assert not PrefixStore("two", store).check(["key"])
    assert PrefixStore("one", store).get("key") == b"1"


def test_tcp_store_answers_its_own_client() -> None:
    server = torch_internals.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch_internals.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    client.set("key", "1")
    assert server.get("key") == b"1"
    assert isinstance(client, torch_internals.Store)


def test_profiler_is_enabled_within_a_profile_and_shows_an_event_until_its_future_is_done() -> None:
    assert not torch_internals.profiler_enabled()
    ended: torch.futures.Future[None] = torch.futures.Future()
    with torch.profiler.profile() as profile:
        assert torch_internals.profiler_enabled()
        with record_function("event") as event:
            torch_internals.end_event_with(event, ended)
        ended.set_result(None)
    assert "event" in {row.key for row in profile.key_averages()}


def test_recorded_methods_are_those_of_a_process_group() -> None:
    named = {
        *gloo_group.OPERATIONS, *gloo_group.REDUCE_SCATTERS, *gloo_group.MESSAGES,
        *gloo_group._OTHERS,
    }  # fmt: skip
    assert named > NEW_METHODS
    for name in named - NEW_METHODS:
        assert callable(getattr(dist.ProcessGroup, name)), name


def test_methods_of_the_mpi_group_are_those_of_a_process_group() -> None:
    module = pytest.importorskip("paceline.collectives.mpi.process_group", exc_type=ImportError)
    private = {"_allgather_base", "_start_coalescing", "_end_coalescing", "_reduce_scatter_base"}
    assert private & set(dir(module.MpiProcessGroup)) <= set(dir(dist.ProcessGroup))
    assert private <= set(dir(module.MpiProcessGroup))


def test_a_group_sums_with_the_registered_backend() -> None:
    store = HashStore()
    backend = torch_internals.ProcessGroupGloo(store, 0, 1, timeout=LIMIT)
    outer: Any = dist.ProcessGroup(store, 0, 1)
    kind = dist.ProcessGroup.BackendType.GLOO
    torch_internals.set_default_backend(outer, kind)
    torch_internals.register_backend(outer, ["cpu"], kind, backend)
    torch_internals.set_group_name(outer, "name")
    summed = torch.ones(2)
    work = outer.allreduce([summed])
    assert isinstance(work, torch_internals.Work)
    work.wait()
    assert outer.group_name == "name"
    assert summed.tolist() == [1.0, 1.0]


def test_group_of_gloo_is_not_one_of_nccl_on_any_device(group: None) -> None:
    devices = (torch.device("cpu"), torch.device("cuda"), torch.device("meta"))
    assert not any(torch_internals.is_nccl(dist.group.WORLD, device) for device in devices)


def test_backend_of_the_class_of_nccl_is_nccl(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch_internals.ProcessGroupGloo
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", kind, raising=False)
    assert torch_internals.is_nccl(dist.group.WORLD, torch.device("cpu"))
    assert not torch_internals.is_nccl(dist.group.WORLD, torch.device("meta"))


def test_group_collects_its_operations_within_torchs_block(group: None) -> None:
    world = dist.group.WORLD
    assert not torch_internals.is_coalescing(world)
    with dist.distributed_c10d._coalescing_manager(world):
        assert torch_internals.is_coalescing(world)
    assert not torch_internals.is_coalescing(world)


def test_functions_are_called_before_and_after_a_method() -> None:
    class Counter:
        def add(self, number: int, *, times: int = 1) -> int:
            if number < 0:
                raise ValueError("negative")
            return number * times

    called: list[Any] = []

    def before(counter: Counter, arguments: tuple[Any, ...]) -> str:
        called.append((type(counter), arguments))
        return "begun"

    torch_internals.surround_method(Counter, "add", before, lambda *found: called.append(found))
    assert Counter().add(2, times=3) == 6
    with pytest.raises(ValueError, match="negative"):
        Counter().add(-1)
    assert called == [(Counter, (2,)), ("begun", 6), (Counter, (-1,))]


def test_source_rank_is_that_of_the_received_message() -> None:
    store = HashStore()  # each end connects in a thread of its own
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda rank: torch_internals.ProcessGroupGloo(store, rank, 2, timeout=LIMIT), range(2)
        )
    received = torch.zeros(1)
    work = first.recv_anysource([received], 7)
    second.send([torch.ones(1)], 0, 7).wait()
    work.wait()
    assert torch_internals.source_rank(work) == 1
    assert received.item() == 1.0


def test_factor_of_a_multiplied_sum() -> None:
    reduce_op = dist._make_nccl_premul_sum(0.25)
    assert torch_internals.factor_of(reduce_op) == 0.25


@pytest.mark.parametrize("asked", ["cpu:paceline,cuda:gloo", "cpu:gloo,cuda:paceline"])
def test_two_back_ends_in_one_group_are_refused_with_advice(asked, tmp_path):
    with pytest.raises(UsageError, match=r"got gloo too\. Create two groups: init_process_group"):
        dist.init_process_group(asked, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert not dist.is_initialized()
