"""Back end `paceline` between ranks that are threads of this process: one host, so no Gloo."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import PeerLost, RankFailed
from paceline.collectives.shared_group import SharedMemoryGroup
from paceline.collectives.shared_memory import LIBRARY, Levels

RANKS = 3
LIMIT_S = 30.0
NAME = "unit"


def open_group(store, rank):
    inner = SimpleNamespace(rank=lambda: rank, size=lambda: RANKS, shutdown=lambda: None)
    levels = Levels(rank, range(RANKS), store, LIMIT_S)
    return SharedMemoryGroup(inner, NAME, levels, rank, LIMIT_S)


@pytest.fixture
def on_all_ranks():
    """on_all_ranks(task): task(group, rank) on every rank at once; the results by rank."""
    store = dist.HashStore()
    with ThreadPoolExecutor(RANKS) as pool:
        groups = list(pool.map(lambda rank: open_group(store, rank), range(RANKS)))
        yield lambda task: list(pool.map(task, groups, range(RANKS)))
        list(pool.map(SharedMemoryGroup.shutdown, groups))


def options_of(kind, **values):
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


@pytest.mark.parametrize(
    ("dtype", "reduction", "values", "expected"),
    [
        # each sum is a tie that would be rounded down after every step
        (torch.float16, dist.ReduceOp.SUM, (1, 2**-11, 2**-11), 1 + 2**-10),
        (torch.bfloat16, dist.ReduceOp.SUM, (1, 2**-8, 2**-8), 1 + 2**-7),
        # the sum does not fit
        (torch.int8, dist.ReduceOp.AVG, (100, 100, 100), 100),
        (torch.int8, dist.ReduceOp.SUM, (100, 100, 100), 44),
        (torch.bool, dist.ReduceOp.SUM, (False, True, True), True),
        (torch.int32, dist.ReduceOp.BXOR, (6, 3, 1), 4),
    ],
)
def test_small_types_are_reduced_in_larger_ones(on_all_ranks, dtype, reduction, values, expected):
    def task(group, rank):
        tensor = torch.tensor([values[rank]], dtype=dtype)
        group.allreduce([tensor], options_of(dist.AllreduceOptions, reduceOp=reduction)).wait()
        return tensor.item()

    assert on_all_ranks(task) == [expected] * RANKS


def fail_on_rank_1(group, rank):
    """Return the message of each rank."""
    own = torch.ones(7 if rank == 1 else 6)
    with pytest.raises((RankFailed, PeerLost)) as caught:
        group.reduce_scatter_single(torch.empty(2), own).wait()
    with pytest.raises(type(caught.value)):  # from then on all do
        group.barrier().wait()
    return str(caught.value)


def test_rank_whose_operation_fails_is_named_to_the_ranks_that_wait(on_all_ranks):
    first, failed, last = on_all_ranks(fail_on_rank_1)
    assert failed.startswith("rank 1: shared memory reduce_scatter failed:")
    for told in (first, last):
        assert "rank 1 has failed" in told


def test_rank_that_leaves_says_in_all_its_groups_whom_it_has_lost_in_one(on_all_ranks):
    store = dist.HashStore()
    others = on_all_ranks(lambda _, rank: open_group(store, rank))
    on_all_ranks(fail_on_rank_1)

    def leave_or_wait(_, rank):
        if rank > 0:
            others[rank].abort()
            return
        with pytest.raises(PeerLost, match=r"rank 1 has failed, so rank [12] has left"):
            others[0].barrier().wait()
        others[0].abort()

    on_all_ranks(leave_or_wait)


def test_root_refuses_tensors_of_other_sizes_and_the_group_works_on(on_all_ranks):
    def task(group, rank):
        if rank == 0:
            own, others = torch.ones(3), [torch.ones(3), torch.ones(3), torch.ones(4)]
            message = r": expected 3 elements of torch.float32 for each rank, got .*\(4, "
            with pytest.raises(ValueError, match="gather" + message):
                group.gather([others], [own], options_of(dist.GatherOptions, rootRank=0))
            with pytest.raises(ValueError, match="scatter" + message):
                group.scatter([own], [others], options_of(dist.ScatterOptions, rootRank=0))
        group.barrier().wait()

    on_all_ranks(task)


def test_only_operations_that_nobody_waits_for_need_a_thread(on_all_ranks):
    def reduce(is_asynchronous):
        options = options_of(dist.AllreduceOptions, asyncOp=is_asynchronous)
        on_all_ranks(lambda group, _: group.allreduce([torch.ones(3)], options).wait())
        return f"{LIBRARY}-{NAME}" in {thread.name for thread in threading.enumerate()}

    assert [reduce(False), reduce(True)] == [False, True]


def memory_files():
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("memfd:paceline" in link for link in links)


def test_closing_frees_memory_and_threads_and_a_second_time_is_harmless():
    gc.collect()
    before, store = memory_files(), dist.HashStore()
    with ThreadPoolExecutor(RANKS) as pool:
        groups = list(pool.map(lambda rank: open_group(store, rank), range(RANKS)))
        list(pool.map(lambda group: group.broadcast([torch.ones(3)]).wait(), groups))
        assert memory_files() > before
        for _ in range(2):
            list(pool.map(SharedMemoryGroup.shutdown, groups))
    del groups
    gc.collect()
    assert memory_files() == before
    assert not [t.name for t in threading.enumerate() if t.name.startswith(LIBRARY)]
