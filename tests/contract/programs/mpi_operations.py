"""Run by mpirun, with nothing set and nothing given: operations of the mpi4py backend.

Those that take any tensors on any group are in fuzz.py; here is what it does not draw.

usage: mpi_operations.py TRANSPORT FOLDER [staged]

staged: as if MPI could not reach the tensors' memory, so that everything goes through a copy on the
host, as tensors on a GPU do with an MPI that knows nothing of GPUs.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import paceline.mpi
from paceline.base.errors import CallsDiffer, TimedOut
from paceline.collectives import buffers
from paceline.train.rank.spans import recording

TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip
ALGORITHMS = ("auto", "native", "ring", "recursive-doubling")
SHORT_S = 5.0  # it also limits the making of a group, for which busy hosts needed more than 2 s


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `rank` has: small whole numbers, so that every type holds them and their sums."""
    return ((torch.arange(count) * 5 + rank * 3) % 4).to(torch.float32).to(dtype)


def total(size: int, count: int) -> torch.Tensor:
    """The sum of all ranks' numbers."""
    return torch.stack([numbers(r, count) for r in range(size)]).sum(0)


def check_moving_every_type(rank: int, size: int) -> None:
    for dtype in TYPES:
        own = numbers(rank, 6, dtype)
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own)
        for r, part in enumerate(gathered):
            assert torch.equal(part, numbers(r, 6, dtype)), dtype
        tensor = numbers(rank, 6, dtype)
        dist.broadcast(tensor, size - 1)
        assert torch.equal(tensor, numbers(size - 1, 6, dtype)), dtype
        outputs = [torch.empty_like(own[:2]) for _ in range(size)]
        dist.all_to_all(
            outputs, [numbers(rank, 2 * size, dtype)[2 * r : 2 * r + 2] for r in range(size)]
        )
        for r, part in enumerate(outputs):
            assert torch.equal(part, numbers(r, 2 * size, dtype)[2 * rank : 2 * rank + 2]), dtype


def check_parts_of_different_sizes(rank: int, size: int) -> None:
    parts = [numbers(rank, r + 2) for r in range(size)]
    reduced = torch.empty(rank + 2)
    dist.reduce_scatter(reduced, parts)
    assert torch.equal(reduced, total(size, rank + 2))


def check_sixteen_bits_are_rounded_once(rank: int, size: int) -> None:
    """256 + 1 is 256 in bfloat16; 256 + 2 is 258, a number that it has."""
    for reduce in ("all", "one", "scatter"):
        tensor = torch.tensor([256.0 if rank == 0 else 2.0 / (size - 1)] * size).bfloat16()
        if reduce == "all":
            dist.all_reduce(tensor)
        elif reduce == "one":
            dist.reduce(tensor, 0)
        else:
            whole, tensor = tensor, torch.empty(1, dtype=torch.bfloat16)
            dist.reduce_scatter_tensor(tensor, whole)
        if reduce != "one" or rank == 0:
            assert tensor[0] == 258, (reduce, tensor)


def check_other_reductions(rank: int, size: int) -> None:
    scaled = torch.full((3,), float(rank + 1))
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled.tolist() == [size * (size + 1) / 4] * 3
    for tensor, op in (
        (torch.ones(2), dist.ReduceOp.BAND),
        (torch.ones(2).to(torch.float8_e5m2), dist.ReduceOp.SUM),
        (torch.ones(2).to_sparse(), dist.ReduceOp.SUM),
    ):
        with pytest.raises(ValueError, match=r"no reduction|expected dense"):
            dist.all_reduce(tensor, op)
    turning = torch.full((2,), 1j * (rank + 1))
    dist.group.WORLD.allreduce([turning]).wait()
    assert turning.tolist() == [1j * size * (size + 1) / 2] * 2


def check_groups_that_overlap(rank: int, size: int) -> None:
    """And end: those of fuzz.py stay to the end of the process."""
    groups = [dist.new_group(sorted({r, (r + 1) % size})) for r in range(size)]
    works, tensors = [], []
    for group in groups:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        tensors.append(torch.full((2,), 1.0 + rank))
        works.append((group, dist.all_reduce(tensors[-1], group=group, async_op=True)))
    for (group, work), tensor in zip(works, tensors, strict=True):
        work.wait()
        assert tensor.tolist() == [sum(1.0 + r for r in dist.get_process_group_ranks(group))] * 2
    for group, _ in works:
        dist.destroy_process_group(group)


def check_futures_of_messages(rank: int, size: int) -> None:
    """They complete although nobody waits for the work."""
    if rank > 1:
        return
    tensor = numbers(rank, 1_000_000)
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    give_up = time.monotonic() + 20
    while not doubled.done() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert doubled.done()
    assert torch.equal(doubled.value(), numbers(0, 1_000_000) * 2)
    assert work.is_completed()


def check_callbacks_that_wait(rank: int, size: int) -> None:
    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        work = dist.all_reduce(future.value()[0], async_op=True)
        return work.get_future().wait()[0]

    work = dist.all_reduce(torch.full((3,), rank + 1.0), async_op=True)
    assert work.get_future().then(again).wait().tolist() == [size * size * (size + 1) / 2] * 3


def check_tensors_of_inference_mode(rank: int, size: int) -> None:
    with torch.inference_mode():
        half, whole = torch.ones(4, dtype=torch.bfloat16), torch.empty(2 * size)
        dist.all_reduce(half, async_op=True).wait()
        dist.all_gather_single(whole, torch.full((2,), float(rank)), async_op=True).wait()
        assert half.tolist() == [size] * 4
        assert whole[::2].tolist() == list(range(size))


def check_calls_that_differ(rank: int, size: int) -> None:
    def other(group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.ones(7), group=group)

    calls = [
        lambda group: dist.all_reduce(torch.ones(6), group=group),
        lambda group: dist.broadcast(torch.ones(7), 0, group=group),
        lambda group: dist.broadcast(torch.ones(0), 0, group=group),
        lambda group: dist.all_gather([torch.ones(7)] * size, torch.ones(7), group=group),
        lambda group: dist.barrier(group=group),
    ]
    for call, algorithm in itertools.product(calls, ALGORITHMS):
        group = dist.new_group(pg_options=paceline.mpi.Options(algorithm=algorithm))
        for _ in range(2):
            with pytest.raises(CallsDiffer, match=r"rank 0: .*: all_reduce sum 7 of float32"):
                (call if rank == 0 else other)(group)
        dist.destroy_process_group(group)


def check_wrong_arguments(rank: int, size: int) -> None:
    """They are refused before MPI writes beyond a tensor, and the group goes on."""
    root = dist.BroadcastOptions()
    root.rootRank = size
    two, parts = torch.ones(2), [torch.ones(2) for _ in range(size)]
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather_single(torch.ones(3), torch.ones(5)),
        lambda: dist.all_gather_single(torch.ones(2 * size), two.double()),
        lambda: dist.all_gather(parts, torch.ones(3)),
        lambda: dist.all_gather(parts[1:], two),
        lambda: dist.reduce_scatter(torch.ones(3), parts),
        lambda: dist.reduce_scatter_single(two, torch.ones(7)),
        lambda: dist.group.WORLD.broadcast([two], root),
        lambda: dist.all_reduce(torch.ones(1).expand(4)),
    ]
    if rank == 0:
        calls += [
            lambda: dist.gather(torch.ones(3), parts),
            lambda: dist.scatter(torch.ones(3), parts),
        ]
    for call in calls:
        with pytest.raises(ValueError, match="expected"):
            call()
    dist.all_reduce(two)
    assert two.tolist() == [size] * 2


def check_batches(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    sent, received = numbers(rank, 100), torch.empty(100)
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(received, numbers(before, 100))
    tensors = [torch.full((n + 1,), float(rank)) for n in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [t.tolist() for t in tensors] == [[size * (size - 1) / 2] * n for n in (1, 2, 3)]
    outputs = [torch.empty(2 * size), torch.empty(3 * size)]
    with dist._coalescing_manager():
        for count, output in zip((2, 3), outputs, strict=True):
            dist.all_gather_into_tensor(output, numbers(rank, count))
    assert torch.equal(outputs[1], torch.cat([numbers(r, 3) for r in range(size)]))
    group = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))
    dist.isend(sent, after)
    dist.irecv(received.zero_(), before)
    work = group._end_coalescing(torch.device("cpu"))
    work.get_future().wait()
    assert work.wait()
    assert torch.equal(received, numbers(before, 100))


def check_functional(rank: int, size: int) -> None:
    """What compiled programs and sharded tensors call, from C++."""
    group = dist.group.WORLD
    own = numbers(rank, 2 * size)
    summed = total(size, 2 * size)
    assert torch.equal(functional.all_reduce(own, "sum", group).clone(), summed)
    gathered = functional.all_gather_tensor(own, 0, group).clone()
    assert torch.equal(gathered, torch.cat([numbers(r, 2 * size) for r in range(size)]))
    scattered = functional.reduce_scatter_tensor(own, "sum", 0, group).clone()
    assert torch.equal(scattered, summed[2 * rank : 2 * rank + 2])
    swapped = functional.all_to_all_single(own, None, None, group).clone()
    want = [numbers(r, 2 * size)[2 * rank : 2 * rank + 2] for r in range(size)]
    assert torch.equal(swapped, torch.cat(want))


def check_objects(rank: int, size: int) -> None:
    found = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank}, found)
    assert found is None or found == [{"rank": r} for r in range(size)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None)
    assert mine == [f"for {rank}"]


def check_recording(rank: int, size: int) -> None:
    file = Path(os.environ["FOLDER"]) / f"communication.{rank}.jsonl"
    with recording(file):
        dist.all_reduce(torch.ones(10))
        if rank == 0:
            dist.send(torch.ones(4), 1)
        elif rank == 1:
            dist.recv(torch.ones(4), 0)
        dist.barrier()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    by_name = {row["operation"]: row for row in rows}
    assert by_name["allreduce"]["payload_bytes"] == 40
    assert by_name["allreduce"]["algorithm"]
    if rank < 2:
        message = by_name["recv" if rank else "send"]
        assert (message["group"].rpartition("/")[2], message["payload_bytes"]) == ("0->1", 16)
    for row in rows:
        assert row["arrived_unix_s"] <= row["started_unix_s"] <= row["ended_unix_s"]


def check_profile(rank: int, size: int) -> None:
    with torch.autograd.profiler.profile() as profile:
        works = [dist.all_reduce(torch.ones(3), async_op=True), dist.barrier(async_op=True)]
        for work in works:
            work.get_future().wait()
    names = {event.name for event in profile.function_events}
    assert {"mpi4py:all_reduce", "mpi4py:barrier"} <= names


def check_messages_that_nobody_sends(rank: int, size: int) -> None:
    """Both a wait and a future end within the limit, and the group stays of use."""
    dist.barrier()  # a rank may be late; the group's own barrier waits no longer than its limit
    group = dist.new_group(timeout=timedelta(seconds=SHORT_S))
    if rank == 0:
        started = time.monotonic()
        unmatched = dist.irecv(torch.empty(1), 1, group=group, tag=7)
        with pytest.raises(TimedOut, match=r"rank 0: MPI recv from rank 1 \("):
            dist.recv(torch.empty(1), 1, group=group, tag=8)
        with pytest.raises(TimedOut, match=r"recv from rank 1 \("):
            unmatched.get_future().wait()
        assert SHORT_S * 0.9 <= time.monotonic() - started < SHORT_S * 3
    dist.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor == size


def check_messages_of_a_group_name_ranks_of_the_world(rank: int, size: int) -> None:
    last = size - 1
    dist.barrier()
    group = dist.new_group([0, last], timeout=timedelta(seconds=SHORT_S))
    hosts: list[str | None] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    if rank == last:
        name = f"rank {last}: MPI recv from rank 0 \\({hosts[0]}\\)"
        with pytest.raises(TimedOut, match=name):
            dist.recv(torch.empty(1), 0, group=group)
    elif rank == 0:
        with pytest.raises(TimedOut, match="rank 0: MPI recv from any rank"):
            dist.recv(torch.empty(1), None, group=group)
    dist.barrier()


CHECKS: list[Callable[[int, int], None]] = [
    check_moving_every_type, check_parts_of_different_sizes, check_sixteen_bits_are_rounded_once,
    check_other_reductions, check_groups_that_overlap, check_futures_of_messages, check_batches,
    check_functional, check_objects, check_recording, check_profile,
    check_callbacks_that_wait, check_tensors_of_inference_mode, check_calls_that_differ,
    check_wrong_arguments,
    check_messages_that_nobody_sends, check_messages_of_a_group_name_ranks_of_the_world,
]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    os.environ["FOLDER"] = str(folder)
    if sys.argv[3:] == ["staged"]:
        buffers.is_on_host = lambda _: False
    listening, passed = set(), set()
    for again in (False, True):  # a second group finds its peers by the same store
        dist.init_process_group("mpi4py", timeout=timedelta(seconds=20))
        rank, size = dist.get_rank(), dist.get_world_size()
        for check in CHECKS[:1] if again else CHECKS:
            check(rank, size)
            dist.barrier()
            passed.add(check.__name__)
        listening |= {
            c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN
        }
        options = dist.group.WORLD.algorithm
        dist.destroy_process_group()
    dist.init_process_group("mpi4py", pg_options=paceline.mpi.Options(algorithm="native"))
    inherited = dist.new_group().algorithm
    report = {
        "passed": sorted(passed),
        "listening": sorted(listening),
        "store": os.environ["MASTER_ADDR"],
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "rank": rank,
        "algorithms": [options, inherited],
    }
    (folder / f"report.{rank}.json").write_text(json.dumps(report))
    # The group is left open on purpose: many scripts do.


main()
