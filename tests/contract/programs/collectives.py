"""Run by mpirun: compare every collective of a transport with numpy; report what passed.

usage: collectives.py TRANSPORT FOLDER [apart]

apart: as if each rank were on a host of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context, make_trial

from paceline.train.rank.peers import join_peers
from paceline.train.rank.spans import recording

FLOATS = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
REDUCE = {
    "sum": (dist.ReduceOp.SUM, np.add),
    "product": (dist.ReduceOp.PRODUCT, np.multiply),
    "min": (dist.ReduceOp.MIN, np.minimum),
    "max": (dist.ReduceOp.MAX, np.maximum),
}
# Larger than one piece of the MPI transport, and no multiple of it.
LONG = 4 * 2**20 // 4 * 2 + 77


def part(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` contributes: small whole numbers, so that every type holds the result."""
    return ((torch.arange(count) * 7 + rank * 5) % 4).to(dtype)


def expected(operation: np.ufunc, size: int, count: int) -> np.ndarray:
    return operation.reduce([part(r, count, torch.float64).numpy() for r in range(size)])


def check_allreduce(transport: str, rank: int, size: int) -> None:
    for name, (reduce_op, operation) in REDUCE.items():
        for dtype in FLOATS + HALVES + INTEGERS:
            for count in (1, 1000):
                tensor = part(rank, count, dtype)
                dist.all_reduce(tensor, reduce_op)
                want = expected(operation, size, count)
                assert np.array_equal(tensor.double().numpy(), want), (name, dtype, count)


def check_average(transport: str, rank: int, size: int) -> None:
    tensor = part(rank, 100, torch.float32)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    np.testing.assert_allclose(tensor.numpy(), expected(np.add, size, 100) / size, rtol=1e-6)


def check_bool(transport: str, rank: int, size: int) -> None:
    tensor = torch.tensor([rank == 0, True, False])
    dist.all_reduce(tensor, dist.ReduceOp.SUM)
    assert tensor.tolist() == [True, True, False]
    tensor = torch.tensor([rank == 0, True, False])
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    assert tensor.tolist() == [False, True, False]


def check_long_and_empty(transport: str, rank: int, size: int) -> None:
    tensor = part(rank, LONG, torch.float32)
    dist.all_reduce(tensor)
    assert np.array_equal(tensor.double().numpy(), expected(np.add, size, LONG))
    tensor = part(rank, LONG, torch.float32)
    dist.broadcast(tensor, size - 1)
    assert torch.equal(tensor, part(size - 1, LONG, torch.float32))
    if transport == "mpi":
        dist.all_reduce(torch.empty(0))


def check_not_contiguous(transport: str, rank: int, size: int) -> None:
    base = part(rank, 24, torch.float32).view(4, 6)
    view = base.t()[1:4]
    dist.all_reduce(view)
    want = sum(part(r, 24, torch.float32).view(4, 6).t()[1:4] for r in range(size))
    assert torch.equal(view, want)
    assert torch.equal(base[:, 0], part(rank, 24, torch.float32).view(4, 6)[:, 0])
    view = part(rank, 24, torch.bool).view(4, 6).t()
    dist.broadcast(view, 0)
    assert torch.equal(view, part(0, 24, torch.bool).view(4, 6).t())


def check_channels_last(transport: str, rank: int, size: int) -> None:
    tensor = part(rank, 48, torch.float32).view(2, 3, 2, 4).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    want = sum(part(r, 48, torch.float32).view(2, 3, 2, 4) for r in range(size))
    assert torch.equal(tensor, want)


def check_broadcast(transport: str, rank: int, size: int) -> None:
    for dtype in FLOATS + HALVES + INTEGERS + [torch.bool]:
        for root in range(size):
            tensor = part(rank, 50, dtype)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, part(root, 50, dtype)), (dtype, root)


def check_gathering(transport: str, rank: int, size: int) -> None:
    own = part(rank, 5, torch.float32)
    every = [part(r, 5, torch.float32) for r in range(size)]
    outputs = [torch.empty(5) for _ in range(size)]
    dist.all_gather(outputs, own)
    assert all(map(torch.equal, outputs, every))
    output = torch.empty(5 * size)
    dist.all_gather_single(output, own)
    assert torch.equal(output, torch.cat(every))


def check_root(transport: str, rank: int, size: int) -> None:
    """One rank gives to, or gets from, all others; large messages have several chunks."""
    for count in (0, 5, 600_001):
        every = [part(r, count, torch.float32) for r in range(size)]
        for root in range(size):
            gathered = [torch.empty(count) for _ in range(size)] if rank == root else None
            dist.gather(every[rank], gathered, dst=root)
            assert gathered is None or all(map(torch.equal, gathered, every))
            target = torch.empty(count)
            dist.scatter(target, every if rank == root else None, src=root)
            assert torch.equal(target, every[rank])
            for reduce_op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                tensor = every[rank].clone()
                dist.reduce(tensor, dst=root, op=reduce_op)
                want = np.add if reduce_op == dist.ReduceOp.SUM else np.maximum
                if rank == root:
                    assert np.array_equal(tensor.double().numpy(), expected(want, size, count))


def check_reduce_scatter(transport: str, rank: int, size: int) -> None:
    parts = [part(rank, 6, torch.float32) + r for r in range(size)]
    target = torch.empty(6)
    dist.reduce_scatter(target, parts)
    want = sum(part(r, 6, torch.float32) + rank for r in range(size))
    assert torch.equal(target, want)


def check_objects(transport: str, rank: int, size: int) -> None:
    found: list[object] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "pad": "x" * rank})
    assert found == [{"rank": r, "pad": "x" * r} for r in range(size)]
    objects: list[object] = [rank, "mine"] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, src=0)
    assert objects == [0, "mine"]


def check_messages(transport: str, rank: int, size: int) -> None:
    """A ring in which all send before they receive: it hangs if a send waits for its receiver."""
    sent = part(rank, LONG, torch.float32)
    received = torch.empty(LONG)
    works = [dist.isend(sent, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(received, part((rank - 1) % size, LONG, torch.float32))
    if rank == 0:
        token = torch.zeros(1)
        source = dist.recv(token)
        assert (source, token.item()) == (1, 9.0)
    elif rank == 1:
        dist.send(torch.full((1,), 9.0), 0)


def check_asynchronous(transport: str, rank: int, size: int) -> None:
    """Works end in any order of waiting, with their futures."""
    tensors = [part(rank, 1000 + n, torch.float32) for n in range(5)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for tensor, work in zip(reversed(tensors), reversed(works), strict=True):
        assert work is not None
        (result,) = work.get_future().wait()
        assert work.wait()
        assert work.is_completed()
        want = expected(np.add, size, len(tensor))
        assert np.array_equal(result.double().numpy(), want)
        assert np.array_equal(tensor.double().numpy(), want)


def check_early_start(transport: str, rank: int, size: int) -> None:
    """An operation that nobody waits for returns before the other ranks begin it."""
    tensor, token = torch.ones(3), torch.zeros(1)
    if rank != 0:
        dist.recv(token, 0)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        for other in range(1, size):
            dist.send(token, other)
    assert work is not None
    work.wait()
    assert tensor.tolist() == [size] * 3


def check_subgroup(transport: str, rank: int, size: int) -> None:
    members = [0, size - 1]
    group = dist.new_group(members)
    if rank in members:
        tensor = torch.full((3,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [1.0 + size] * 3
        dist.destroy_process_group(group)
    dist.barrier()


CHECKS: list[Callable[[str, int, int], None]] = [
    check_allreduce, check_average, check_bool, check_long_and_empty, check_not_contiguous,
    check_channels_last, check_broadcast, check_gathering, check_root, check_reduce_scatter,
    check_objects, check_messages, check_asynchronous, check_early_start, check_subgroup,
]  # fmt: skip
# torch's Gloo has no AVG, does not reduce bool, and refuses tensors that are not contiguous.
NOT_IN_GLOO = {check_average, check_bool, check_not_contiguous, check_channels_last}


def listening() -> list[str]:
    """Addresses that this process listens on, from /proc."""
    own = {
        str(link.readlink())[8:-1]
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and str(link.readlink()).startswith("socket:[")
    }
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                found.append(fields[1].split(":")[0])
    return found


def main() -> None:
    torch.set_num_threads(1)
    transport, folder = sys.argv[1], Path(sys.argv[2])
    if sys.argv[3:] == ["apart"] and transport == "mpi":
        from paceline.collectives.mpi import all_reduce

        all_reduce.hosts_of = lambda comm: tuple(range(comm.size))
    context = make_context(folder)
    if sys.argv[3:] == ["apart"] and transport == "paceline":  # the last rank has its own host
        from paceline.collectives import shared_memory

        shared_memory.host_identity = lambda: str(context.rank == context.world_size - 1)
    peers = join_peers(context, make_trial(transport, context.world_size))
    passed: list[str] = []
    with recording(folder / f"communication.{context.rank}.jsonl"):
        for check in CHECKS:
            if transport == "gloo" and check in NOT_IN_GLOO:
                continue
            check(transport, context.rank, context.world_size)
            dist.barrier()
            passed.append(check.__name__)
    report = {
        "passed": passed,
        "listening": listening(),
        "mpi4py_loaded": "mpi4py" in sys.modules,
        "describe": peers.describe(),
    }
    peers.leave(failed=False)
    (folder / f"report.{context.rank}.json").write_text(json.dumps(report))


main()
