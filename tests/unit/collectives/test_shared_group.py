"""Back end `paceline` between ranks that are threads of this process: one host, so no Gloo."""

from __future__ import annotations

import gc
import itertools
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import CallsDiffer, PeerLost, RankFailed, TimedOut, UsageError
from paceline.collectives.gloo_group import create_gloo, release_gloo
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
    if rank == 1:
        group._levels.host.segments.allreduce = None  # cannot be called
    with pytest.raises((RankFailed, PeerLost)) as caught:
        group.allreduce([torch.empty(2)]).wait()
    with pytest.raises(type(caught.value)):  # from then on all do
        group.barrier().wait()
    return str(caught.value)


def test_rank_whose_operation_fails_is_named_to_the_ranks_that_wait(on_all_ranks):
    first, failed, last = on_all_ranks(fail_on_rank_1)
    assert failed.startswith("rank 1: shared memory allreduce failed:")
    for told in (first, last):
        assert "rank 1 has failed" in told


SIX, SEVEN = (lambda: [torch.ones(6)]), (lambda: [torch.ones(7)])


def rooted(kind, root):
    return options_of(kind, rootRank=root)


def lists(count, length=2):
    return [[torch.ones(length) for _ in range(count)]]


CALLS = {
    "all_reduce": lambda g: g.allreduce(SIX()),
    "all_reduce of another size": lambda g: g.allreduce(SEVEN()),
    "all_reduce of nothing": lambda g: g.allreduce([torch.ones(0)]),
    "all_reduce of another type": lambda g: g.allreduce([torch.ones(3, dtype=torch.float64)]),
    "all_reduce by another operation": lambda g: g.allreduce(
        SIX(), options_of(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)
    ),
    "all_reduce of two": lambda g: g.allreduce_coalesced([torch.ones(3), torch.ones(3)]),
    "broadcast": lambda g: g.broadcast(SIX(), rooted(dist.BroadcastOptions, 0)),
    "broadcast from 1": lambda g: g.broadcast(SIX(), rooted(dist.BroadcastOptions, 1)),
    "broadcast of nothing": lambda g: g.broadcast([torch.ones(0)]),
    "reduce": lambda g: g.reduce(SIX(), rooted(dist.ReduceOptions, 0)),
    "reduce to 1": lambda g: g.reduce(SIX(), rooted(dist.ReduceOptions, 1)),
    "all_gather": lambda g: g.allgather(lists(RANKS), [torch.ones(2)]),
    "all_gather of others": lambda g: g.allgather(lists(RANKS, 3), [torch.ones(3)]),
    "all_gather_single": lambda g: g.all_gather_single(torch.ones(6), torch.ones(2)),
    "reduce_scatter": lambda g: g.reduce_scatter(
        [torch.ones(2)], lists(RANKS), dist.ReduceScatterOptions()
    ),
    "reduce_scatter_single": lambda g: g.reduce_scatter_single(torch.ones(2), torch.ones(6)),
    "barrier": lambda g: g.barrier(),
}


@pytest.mark.parametrize(("most", "other"), [*itertools.pairwise([*CALLS, "all_reduce"])])
def test_ranks_that_call_different_things_all_get_an_error_with_both(on_all_ranks, most, other):
    def task(group, rank):
        for _ in range(3):
            group.allreduce([torch.ones(2)]).wait()
        with pytest.raises(CallsDiffer, match=r"same time: rank 0, rank 2: .+; rank 1: ") as caught:
            CALLS[other if rank == 1 else most](group).wait()
        with pytest.raises(CallsDiffer):  # no other number from then on
            group.allreduce([torch.ones(2)]).wait()
        return str(caught.value)

    assert len(set(on_all_ranks(task))) == 1


def test_all_to_all_whose_parts_do_not_fit_is_an_error_on_all_ranks(on_all_ranks):
    def task(group, rank):
        expected = [torch.ones(9 if (rank, sender) == (2, 1) else 4) for sender in range(RANKS)]
        with pytest.raises(CallsDiffer, match=r"rank 1 of the group sends 4 .* 2, which expects 9"):
            group.alltoall(expected, [torch.ones(4) for _ in range(RANKS)]).wait()

    on_all_ranks(task)


WRONG = {
    "all_gather": lambda g: g.allgather(lists(RANKS), [torch.ones(3)]),
    "all_gather of too few": lambda g: g.allgather(lists(RANKS - 1), [torch.ones(2)]),
    "all_gather_single": lambda g: g.all_gather_single(torch.ones(3), torch.ones(5)),
    "all_gather_single of a type": lambda g: g.all_gather_single(
        torch.ones(6), torch.ones(2, dtype=torch.int32)
    ),
    "reduce_scatter": lambda g: g.reduce_scatter(
        [torch.ones(3)], lists(RANKS), dist.ReduceScatterOptions()
    ),
    "reduce_scatter_single": lambda g: g.reduce_scatter_single(torch.ones(2), torch.ones(7)),
    "reduce_scatter_single of a type": lambda g: g.reduce_scatter_single(
        torch.ones(2, dtype=torch.float64), torch.ones(6)
    ),
    "root": lambda g: g.broadcast(SIX(), rooted(dist.BroadcastOptions, RANKS)),
    "expanded": lambda g: g.allreduce([torch.ones(1).expand(4)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_and_the_group_works_on(on_all_ranks, name):
    def task(group, rank):
        del rank
        with pytest.raises(ValueError, match="expected"):
            WRONG[name](group)
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        return tensor.tolist()

    assert on_all_ranks(task) == [[RANKS, RANKS]] * RANKS


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("name", [name for name in CALLS if "nothing" not in name])
def test_tensors_of_inference_mode_are_written(on_all_ranks, name, is_asynchronous):
    def make():
        return [torch.ones(8, 2, dtype=torch.bfloat16).t(), torch.ones(4), torch.empty(6)]

    def task(group, rank):
        del rank
        with torch.inference_mode():
            half, whole, parts = make()
            CALLS[name](group).wait()
        options = options_of(dist.AllreduceOptions, asyncOp=is_asynchronous)
        group.allreduce([half], options).wait()
        group.broadcast([half], options_of(dist.BroadcastOptions, asyncOp=is_asynchronous)).wait()
        group.all_gather_single(parts, torch.ones(2)).wait()
        with torch.inference_mode():
            return half.sum().item(), whole.sum().item(), parts.sum().item()

    assert on_all_ranks(task) == [(16 * RANKS, 4, 2 * RANKS)] * RANKS


def test_refusal_of_gloo_leaves_the_group_usable(on_all_ranks):
    def task(group, rank):
        del rank

        def refuse(*_):
            raise RuntimeError("Invalid scalar type")

        group._inner.allreduce = refuse
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            group.allreduce([torch.ones(2, dtype=torch.complex32)]).wait()
        group.barrier().wait()

    on_all_ranks(task)


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


def test_call_has_its_own_limit_and_all_ranks_name_the_same_absent_one(on_all_ranks):
    missing = threading.Event()

    def task(group, rank):
        if rank == 1:
            missing.wait(20)
            return ""
        options = options_of(dist.BarrierOptions, timeout=timedelta(seconds=0.5 + rank))
        started = time.monotonic()
        with pytest.raises((TimedOut, PeerLost), match=r"\brank 1\b") as caught:
            group.barrier(options).wait()
        assert time.monotonic() - started < 5
        if rank == 0:
            missing.set()
        return str(caught.value)

    first, _, last = on_all_ranks(task)
    assert "waited 0.5 s for rank 1 to meet" in first
    assert "rank 1 did not come within 0.5 s, so rank 0 has failed" in last


def test_destroyed_group_says_so(on_all_ranks):
    def task(group, rank):
        del rank
        group.barrier().wait()
        group.shutdown()
        for call in (*CALLS.values(), lambda g: g.send([torch.ones(2)], 0, 0)):
            with pytest.raises(UsageError, match=f"process group {NAME} has been destroyed"):
                call(group)

    on_all_ranks(task)


def test_copy_of_a_group_in_a_forked_process_is_refused_and_tells_no_peer(on_all_ranks):
    def task(group, rank):
        child = os.fork() if rank == 0 else None
        if child == 0:
            try:
                group.barrier()
            except UsageError as error:
                os._exit(int("forked" not in str(error)))
            finally:
                os._exit(2)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0
        group.barrier().wait()
        return ended

    assert on_all_ranks(task) == [0] * RANKS


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


def gloo_threads():
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.parametrize("is_just_used", [False, True])
def test_gloo_group_is_freed_when_its_release_returns_by_no_thread_of_its_own(is_just_used):
    before, threads = gloo_threads(), threading.active_count()
    given = SimpleNamespace(
        group_rank=0, group_size=1, timeout=timedelta(seconds=LIMIT_S), global_ranks_in_group=[],
        group_id=NAME,
    )  # fmt: skip
    backend, inner = create_gloo(given, dist.HashStore())
    inner.allreduce([torch.ones(3)]).wait()
    assert gloo_threads() > before
    release_gloo(inner, time.monotonic() if is_just_used else -math.inf)
    del backend, inner
    assert (gloo_threads(), threading.active_count()) == (before, threads)
