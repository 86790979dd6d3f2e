"""Features of torch.distributed over one back end, against plain arithmetic or one process.

usage: features.py TRANSPORT FOLDER BACKEND     (as one of the ranks that mpirun starts)

Writes FOLDER/features.RANK.json: for each feature an error, or "".
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline.mpi  # noqa: F401  (back end "mpi4py", and where the ranks meet)
from paceline.distributed import share_buckets

LIMIT = timedelta(seconds=30)
BATCH, STEPS, RATE = 8, 3, 0.1
FEATURES: dict[str, Callable[[int, int], None]] = {}
Check = Callable[[int, int], None]


def feature(name: str) -> Callable[[Check], Check]:
    """Register a check of (rank, ranks); it raises an error if the feature does not work."""

    def register(check: Check) -> Check:
        FEATURES[name] = check
        return check

    return register


def expect(got: Tensor, want: Tensor | float, tolerance: float = 1e-5) -> None:
    difference = (got.detach().double() - torch.as_tensor(want).detach().double()).abs().max()
    if difference > tolerance:
        raise ValueError(f"got {got}, expected {want}")


# --- operations ---------------------------------------------------------------------------------


@feature("all_reduce by sum, product, min, max, average")
def reductions(rank: int, ranks: int) -> None:
    numbers = torch.arange(1.0, ranks + 1)
    for op, want in (
        (dist.ReduceOp.SUM, numbers.sum()), (dist.ReduceOp.PRODUCT, numbers.prod()),
        (dist.ReduceOp.MIN, 1.0), (dist.ReduceOp.MAX, float(ranks)),
        (dist.ReduceOp.AVG, numbers.mean()),
    ):  # fmt: skip
        tensor = torch.full((5,), rank + 1.0)
        dist.all_reduce(tensor, op)
        expect(tensor, want)


@feature("all_reduce by bits")
def bitwise(rank: int, ranks: int) -> None:
    tensor = torch.tensor([1 << rank])
    dist.all_reduce(tensor, dist.ReduceOp.BOR)
    expect(tensor, (1 << ranks) - 1)


@feature("all_reduce of complex, bool, float16, bfloat16")
def types(rank: int, ranks: int) -> None:
    del rank
    for dtype in (torch.complex64, torch.float16, torch.bfloat16):
        tensor = torch.ones(3, dtype=dtype)
        dist.all_reduce(tensor)
        expect(tensor.real if tensor.is_complex() else tensor, ranks)
    flags = torch.ones(3, dtype=torch.bool)
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    expect(flags, 1)


@feature("all_reduce of sparse tensors")
def sparse(rank: int, ranks: int) -> None:
    tensor = torch.sparse_coo_tensor([[rank, rank + 1]], torch.ones(2), (ranks + 1,))
    dist.all_reduce(tensor)
    expect(tensor.to_dense().sum(), 2 * ranks)


@feature("tensors that are strided, shared, unaligned, empty or parameters")
def odd_tensors(rank: int, ranks: int) -> None:
    del rank
    raw = bytearray(4 * 100 + 1)
    unaligned = torch.frombuffer(raw, dtype=torch.uint8)[1:].numpy().view("f4")
    for tensor in (
        torch.zeros(6, 4).t(), torch.zeros(1001)[1:], torch.zeros(100).share_memory_(),
        torch.from_numpy(unaligned), torch.zeros(0, 3), nn.Parameter(torch.zeros(4)),
    ):  # fmt: skip
        with torch.no_grad():
            tensor.add_(1)
        dist.all_reduce(tensor)
        if tensor.numel():
            expect(tensor, ranks)


@feature("broadcast, reduce, gather, scatter")
def rooted(rank: int, ranks: int) -> None:
    for root in range(ranks):
        own = torch.full((3,), float(rank))
        dist.broadcast(own, root)
        expect(own, root)
        own = torch.full((3,), float(rank))
        dist.reduce(own, root)
        if rank == root:
            expect(own, sum(range(ranks)))
        parts = [torch.full((3,), float(part)) for part in range(ranks)]
        dist.scatter(own, parts if rank == root else None, root)
        expect(own, rank)
        dist.gather(own, parts if rank == root else None, root)
        expect(torch.stack(parts)[:, 0], torch.arange(float(ranks)))


@feature("all_gather of different sizes")
def all_gather(rank: int, ranks: int) -> None:
    parts = [torch.empty(2 + part) for part in range(ranks)]
    dist.all_gather(parts, torch.full((2 + rank,), float(rank)))
    for part, got in enumerate(parts):
        expect(got, part)


@feature("reduce_scatter")
def reduce_scatter(rank: int, ranks: int) -> None:
    own = torch.empty(3)
    dist.reduce_scatter(own, [torch.full((3,), float(part)) for part in range(ranks)])
    expect(own, ranks * rank)


@feature("all_gather and reduce_scatter of one tensor")
def whole_tensors(rank: int, ranks: int) -> None:
    whole = torch.empty(2 * ranks)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    expect(whole, torch.arange(float(ranks)).repeat_interleave(2))
    own = torch.empty(2)
    dist.reduce_scatter_tensor(own, whole)
    expect(own, ranks * rank)


@feature("all_to_all of one tensor, in different parts")
def all_to_all_single(rank: int, ranks: int) -> None:
    sent = torch.cat([torch.full((part + 1,), 10.0 * rank + part) for part in range(ranks)])
    got = torch.empty((rank + 1) * ranks)
    dist.all_to_all_single(got, sent, [rank + 1] * ranks, [part + 1 for part in range(ranks)])
    expect(got, torch.arange(float(ranks)).repeat_interleave(rank + 1) * 10 + rank)


@feature("all_to_all of lists of different sizes")
def all_to_all(rank: int, ranks: int) -> None:
    got = [torch.empty(rank + 1) for _ in range(ranks)]
    dist.all_to_all(got, [torch.full((part + 1,), float(rank)) for part in range(ranks)])
    for part, each in enumerate(got):
        expect(each, part)


@feature("messages: tags, batches, from any rank")
def messages(rank: int, ranks: int) -> None:
    got, own = torch.empty(5), torch.full((5,), float(rank))
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    pair = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    expect(got, before)
    if rank == 0:
        dist.send(own, 1, tag=3)
    elif rank == 1 and dist.recv(got, tag=3) != 0:
        raise ValueError("the message came from another rank")


@feature("objects")
def objects(rank: int, ranks: int) -> None:
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    given: list[Any] = ["a", 1] if rank == 0 else [None, None]
    dist.broadcast_object_list(given, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [*range(ranks)] if rank == 0 else None)
    gathered: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(rank, gathered)
    if ([each["rank"] for each in found], given, mine) != ([*range(ranks)], ["a", 1], [rank]):
        raise ValueError(f"got {found} {given} {mine}")


@feature("barrier")
def barrier(rank: int, ranks: int) -> None:
    del ranks
    begun = time.monotonic()
    if rank == 0:
        time.sleep(0.2)
    dist.barrier()
    if time.monotonic() - begun < 0.1:
        raise ValueError("a rank did not wait")


@feature("monitored_barrier")
def monitored_barrier(rank: int, ranks: int) -> None:
    del rank, ranks
    dist.monitored_barrier()


@feature("coalesced operations")
def coalesced(rank: int, ranks: int) -> None:
    tensors = [torch.full((3,), float(rank + n)) for n in range(4)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for n, tensor in enumerate(tensors):
        expect(tensor, sum(other + n for other in range(ranks)))
    whole = [torch.empty(3 * ranks) for _ in tensors]
    with _coalescing_manager():
        for got, tensor in zip(whole, tensors, strict=True):
            dist.all_gather_into_tensor(got, tensor)
    expect(whole[0], torch.cat([tensors[0]] * ranks))


@feature("callbacks that wait for other operations")
def callbacks(rank: int, ranks: int) -> None:
    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        found: Tensor = dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]
        return found

    work = dist.all_reduce(torch.full((3,), rank + 1.0), async_op=True)
    expect(work.get_future().then(again).wait(), ranks * ranks * (ranks + 1) / 2)


@feature("inference mode")
def inference_mode(rank: int, ranks: int) -> None:
    with torch.inference_mode():
        whole = torch.empty(2 * ranks)
        work = dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)), async_op=True)
        work.wait()
        expect(whole, torch.arange(float(ranks)).repeat_interleave(2))


@feature("functional collectives")
def functional_collectives(rank: int, ranks: int) -> None:
    own = torch.arange(2.0 * ranks)
    expect(functional.all_reduce(own, "sum", dist.group.WORLD), own * ranks)
    expect(functional.all_gather_tensor(own[:1] + rank, 0, dist.group.WORLD), torch.arange(ranks))
    scattered = functional.reduce_scatter_tensor(own, "avg", 0, dist.group.WORLD)
    expect(scattered, own[2 * rank : 2 * rank + 2])


@feature("compiled collectives")
def compiled(rank: int, ranks: int) -> None:
    def both(own: Tensor) -> tuple[Tensor, Tensor]:
        summed = functional.all_reduce(own * 2, "sum", dist.group.WORLD)
        return summed, functional.all_gather_tensor(own, 0, dist.group.WORLD)

    summed, whole = torch.compile(both, backend="aot_eager")(torch.full((2,), float(rank)))
    expect(summed, sum(range(ranks)) * 2)
    expect(whole, torch.arange(float(ranks)).repeat_interleave(2))


@feature("compiled DDP")
def compiled_ddp(rank: int, ranks: int) -> None:
    net = torch.nn.Linear(2, 1, bias=False)
    model = torch.compile(DistributedDataParallel(net), backend="aot_eager")
    model(torch.full((1, 2), float(rank))).sum().backward()
    expect(net.weight.grad, (ranks - 1) / 2)


@feature("collectives with gradients")
def gradients(rank: int, ranks: int) -> None:
    own = torch.ones(4, requires_grad=True)
    differentiable.all_reduce(own * (rank + 1)).sum().backward()
    expect(own.grad, ranks * (rank + 1))
    own = torch.ones(4, requires_grad=True)
    sum(each.sum() for each in differentiable.all_gather(own)).backward()
    expect(own.grad, ranks)


# --- groups -------------------------------------------------------------------------------------


@feature("groups: overlapping, of one rank, in another order, made locally")
def groups(rank: int, ranks: int) -> None:
    members = [[*range(ranks)][::-1], [0, ranks - 1], *([each] for each in range(ranks))]
    for ours in members:
        group = dist.new_group(ours)
        if rank in ours:
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            expect(tensor, len(ours))
            dist.destroy_process_group(group)
    group = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(2), group=group)


@feature("a group of Gloo beside it")
def other_group(rank: int, ranks: int) -> None:
    del rank
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=dist.new_group(backend="gloo", timeout=LIMIT))
    expect(tensor, ranks)


@feature("threads that each use a group")
def threads(rank: int, ranks: int) -> None:
    wrong: list[int] = []

    def use(group: Any) -> None:
        for n in range(50):
            tensor = torch.full((1 + 37 * n,), float(rank + n))
            dist.all_reduce(tensor, group=group)
            if tensor[0] != sum(other + n for other in range(ranks)):
                wrong.append(n)

    users = [threading.Thread(target=use, args=(dist.new_group(),)) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    if wrong:
        raise ValueError(f"wrong sums: {wrong}")


@feature("a time-out of its own for each wait")
def time_out(rank: int, ranks: int) -> None:
    del ranks
    group, begun = dist.new_group(), time.monotonic()
    if rank > 0:
        time.sleep(2)
        return
    try:
        dist.barrier(group=group, async_op=True).wait(timeout=timedelta(seconds=0.5))
    except Exception:  # noqa: BLE001  (its class depends on the back end)
        if time.monotonic() - begun < 1.5:
            return
    raise ValueError(f"the wait took {time.monotonic() - begun:.1f} s")


@feature("wrong arguments are refused, and the group goes on")
def refusal(rank: int, ranks: int) -> None:
    del rank
    try:
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(5))
    except Exception:  # noqa: BLE001  (its class depends on the back end)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        expect(tensor, ranks)
        return
    raise ValueError("nothing was refused")


@feature("ranks that call different things all get both calls")
def disagreement(rank: int, ranks: int) -> None:
    del ranks
    group = dist.new_group(timeout=timedelta(seconds=5))
    try:
        dist.all_reduce(torch.ones(6 + (rank == 0)), group=group)
    except Exception as error:
        if "6 of float32" in str(error) and "7 of float32" in str(error):
            return
        raise
    raise ValueError("no error")


@feature("torch's profiler")
def profiler(rank: int, ranks: int) -> None:
    del rank, ranks
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(1000))
    if not any("all_reduce" in event.key for event in profile.key_averages()):
        raise ValueError("no event")


# --- training -----------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def samples(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = BATCH * ranks
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 4, generator=generator)


def train(
    model: nn.Module, optimizer: Any, rank: int, ranks: int, steps: int = STEPS, share: int = 0
) -> None:
    """share: number of ranks that divide each batch; 0 means all."""
    every = share or ranks
    for step in range(steps):
        inputs, targets = (each[rank % every :: every] for each in samples(step, ranks))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).float(), targets).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def weights(model: nn.Module) -> Tensor:
    whole = [
        each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()
    ]
    return torch.cat([each.detach().flatten() for each in whole])


def expect_trained(got: Tensor, ranks: int, tolerance: float = 1e-4) -> None:
    alone = network()
    train(alone, sgd(alone), 0, ranks, share=1)
    expect(got, weights(alone), tolerance)


def check_ddp(
    rank: int, ranks: int, tolerance: float = 1e-4, hook: Any = None, **options: Any
) -> None:
    model = DistributedDataParallel(network(), **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    train(model, sgd(model), rank, ranks)
    expect_trained(weights(model), ranks, tolerance)


@feature("DistributedDataParallel")
def ddp(rank: int, ranks: int) -> None:
    check_ddp(rank, ranks)


@feature("DDP: static graph, unused parameters, small buckets as gradients")
def ddp_options(rank: int, ranks: int) -> None:
    check_ddp(rank, ranks, static_graph=True)
    check_ddp(rank, ranks, find_unused_parameters=True)
    check_ddp(rank, ranks, gradient_as_bucket_view=True, bucket_cap_mb=0.001)


@feature("DDP: hooks for float16 and bfloat16")
def ddp_short_types(rank: int, ranks: int) -> None:
    check_ddp(rank, ranks, 1e-2, (None, default_hooks.fp16_compress_hook))
    check_ddp(rank, ranks, 5e-2, (None, default_hooks.bf16_compress_hook))


@feature("DDP: share_buckets")
def ddp_shared_buckets(rank: int, ranks: int) -> None:
    for as_view in (False, True):
        layer = nn.Linear(400, 400)  # large enough to be shared
        model = DistributedDataParallel(layer, gradient_as_bucket_view=as_view)
        share_buckets(model)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 400), rank + 1.0)).sum().backward()
            expect(layer.weight.grad, (ranks + 1) / 2)


@feature("DDP: workers that are forked")
def ddp_workers(rank: int, ranks: int) -> None:
    model = DistributedDataParallel(network())
    rows = TensorDataset(*samples(0, ranks))
    sampler = DistributedSampler(rows, ranks, rank)
    loader = DataLoader(rows, 2, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # the workers have left the group to this process
    expect(tensor, ranks)


@feature("DDP: PowerSGD")
def ddp_power_sgd(rank: int, ranks: int) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    check_ddp(rank, ranks, 1.0, (state, powerSGD_hook.powerSGD_hook))


@feature("DDP: no_sync, and Join with uneven numbers of steps")
def ddp_uneven(rank: int, ranks: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    with model.no_sync():
        model(samples(0, ranks)[0]).sum().backward()
    with Join([model]):
        train(model, optimizer, rank, ranks, steps=2 + rank)
    all_weights = [torch.empty_like(weights(model)) for _ in range(ranks)]
    dist.all_gather(all_weights, weights(model))
    expect(all_weights[0], all_weights[-1])


@feature("ZeroRedundancyOptimizer")
def zero(rank: int, ranks: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=RATE, momentum=0.9)
    train(model, optimizer, rank, ranks)
    expect_trained(weights(model), ranks)


@feature("FullyShardedDataParallel")
def fsdp(rank: int, ranks: int) -> None:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model = FullyShardedDataParallel(network(), **options)
    train(model, sgd(model), rank, ranks)
    with FullyShardedDataParallel.summon_full_params(model):
        expect_trained(weights(model), ranks)


@feature("fully_shard, also in bfloat16 and with replicas")
def sharded(rank: int, ranks: int) -> None:
    exact = MixedPrecisionPolicy()
    short = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for shape, names, policy, tolerance in (
        ((ranks,), ("shards",), exact, 1e-4),
        ((ranks // 2, 2), ("replicas", "shards"), exact, 1e-4),
        ((ranks,), ("shards",), short, 0.1),
    ):
        mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), network()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        train(model, sgd(model), rank, ranks)
        expect_trained(weights(model), ranks, tolerance)


@feature("tensor parallelism")
def tensor_parallel(rank: int, ranks: int) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(), init_device_mesh("cpu", (ranks,)), plan)
    train(model, sgd(model), rank, ranks, share=1)
    expect_trained(weights(model), ranks)


@feature("pipeline parallelism")
def pipelined(rank: int, ranks: int) -> None:
    layers = [*network()]
    part = nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
    inputs, targets = samples(0, ranks)
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets)
    if part[0].weight.grad is None:
        raise ValueError("no gradient")


@feature("averages of models")
def averages(rank: int, ranks: int) -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, float(rank))
    model(torch.ones(1)).backward()  # only parameters with a gradient count
    PeriodicModelAverager(period=1, warmup_steps=0).average_parameters(model.parameters())
    expect(model.weight, (ranks - 1) / 2)


@feature("distributed checkpoints, also asynchronous")
def checkpoints(rank: int, ranks: int) -> None:
    del rank, ranks
    saved, loaded = {"weight": torch.arange(5.0)}, {"weight": torch.zeros(5)}
    folder = str(Path(sys.argv[2]) / "checkpoint")
    checkpoint.save(saved, checkpoint_id=folder)
    checkpoint.load(loaded, checkpoint_id=folder)
    expect(loaded["weight"], saved["weight"])
    group = dist.new_group(backend="cpu:gloo")
    checkpoint.async_save(saved, checkpoint_id=f"{folder}.later", process_group=group).result()


# --- the default group anew; last, as the others need it ------------------------------------------


@feature("init_process_group again, after destroy_process_group")
def again(rank: int, ranks: int) -> None:
    del rank
    if sys.argv[3] == "gloo":
        raise ValueError("it may connect to a group before: some of 40 cycles fail, some do not")
    for _ in range(10):
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(sys.argv[3], timeout=LIMIT)
        tensor = torch.ones(70_000)
        dist.all_reduce(tensor)
        expect(tensor, ranks)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder, backend = Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group(backend, timeout=LIMIT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    outcomes = {}
    for name, check in FEATURES.items():
        begun = time.monotonic()
        try:
            check(rank, ranks)
            outcomes[name] = ""
        except Exception as error:  # noqa: BLE001  (told to the test)
            outcomes[name] = f"{type(error).__name__}: {error}"[:500]
        print(f"{backend} {rank} {name}: {time.monotonic() - begun:.1f} s {outcomes[name]}")
        dist.barrier()
    (folder / f"features.{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
