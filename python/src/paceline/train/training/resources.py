"""Assign a node's cores to its ranks, and a rank's cores to its workers.

Every rank computes the same assignment from the same facts, without communication. Physical cores
are used before second hardware threads (SMT siblings), a rank's cores lie on one NUMA node if they
fit, and consecutive ranks fill node after node, so that pipeline neighbours are close to each
other.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.cgroups import cpu_quotas, read_limits
from paceline.base.host.machine import (
    SYSTEM,
    PhysicalCore,
    cpu_model,
    numa_nodes_of,
    package_versions,
    physical_cores,
)
from paceline.measure.records.rows import RankEnvironment, WorkerEnvironment
from paceline.measure.records.virtual_clock import LINK_VARIABLE, own_dilation
from paceline.plan.spec.extensions import STRATEGIES
from paceline.plan.trials.trial import Placement, RankContext, Trial

# Physical cores of a NUMA node, each as its hardware threads.
_Node = list[tuple[int, ...]]


def choose_cores(
    allowed: Sequence[int], context: RankContext, placement: Placement, root: Path = SYSTEM
) -> list[int]:
    """Return the cores of one rank, out of those that this process may use, in ascending order.

    If the launcher has already bound each rank (as `mpirun --bind-to core` does), the rank keeps
    its own cores. With `oversubscribe`, ranks share all cores, or as many as are allocated. Raises
    EnvironmentLacks if there are too few.
    """
    threads = placement.threads_per_rank
    if placement.oversubscribe:
        shared = min(placement.allocated_cores or len(allowed), len(allowed))
        return deal(allowed, 1, shared, root)[0]
    if len(allowed) >= context.ranks_on_node * threads:
        return deal(allowed, context.ranks_on_node, threads, root)[context.local_rank]
    if len(allowed) >= threads and context.ranks_on_node > 1:
        # bound by the launcher; check_node detects a wrong binding
        return deal(allowed, 1, threads, root)[0]
    raise EnvironmentLacks(
        f"host {context.host}: {context.ranks_on_node} ranks of {threads} threads need "
        f"{context.ranks_on_node * threads} cores, rank {context.rank} may use {len(allowed)} "
        f"({', '.join(map(str, allowed))}); use fewer ranks or threads, give the job more cores, "
        "or set oversubscribe = true"
    )


def worker_cores(
    affinity: Sequence[int], worker: int, workers: int, oversubscribe: bool, root: Path = SYSTEM
) -> list[int]:
    """Return the cores of one of a rank's worker threads, out of the rank's cores, in ascending
    order.

    With `oversubscribe` these are all of them. Raises EnvironmentLacks if there are fewer than
    workers.
    """
    if oversubscribe:
        return sorted(affinity)
    if len(affinity) < workers:
        raise EnvironmentLacks(
            f"{workers} replicas of a rank need a core each, the rank has {len(affinity)} "
            f"({', '.join(map(str, affinity))}); use fewer replicas or set oversubscribe = true"
        )
    return deal(affinity, workers, len(affinity) // workers, root)[worker]


def deal(allowed: Sequence[int], shares: int, cores: int, root: Path = SYSTEM) -> list[list[int]]:
    """Return `shares` disjoint ascending lists of `cores` core numbers out of `allowed`.

    `allowed` must contain enough. The total determines how many hardware threads per core are used,
    so all divisions of a node with the same total get the same kind of cores.
    """
    assert len(allowed) >= shares * cores, (allowed, shares, cores)
    physical = physical_cores(allowed, root)
    depth = _depth(physical, shares * cores)
    numa = _by_numa_node(physical, depth)
    dealt: list[list[int]] = []
    for node, count in zip(numa, _shares_by_node(numa, shares, cores), strict=True):
        dealt += _deal_node(node, count, cores)
    taken = {core for share in dealt for core in share}
    rest = [core for core in _thread_after_thread(numa) if core not in taken]
    # Lists that fit on no single node take the remaining cores of several nodes.
    dealt += [rest[i * cores : (i + 1) * cores] for i in range(shares - len(dealt))]
    return [sorted(share) for share in dealt]


def _depth(physical: Sequence[PhysicalCore], wanted: int) -> int:
    """Return the fewest hardware threads per core that give `wanted` threads."""
    depth = 1
    while sum(len(core.threads[:depth]) for core in physical) < wanted:
        depth += 1
    return depth


def _by_numa_node(physical: Sequence[PhysicalCore], depth: int) -> list[_Node]:
    """Return the first hardware threads of the cores, `depth` of each, by NUMA node."""
    nodes: dict[int | None, _Node] = {}
    for core in physical:
        nodes.setdefault(core.numa_node, []).append(core.threads[:depth])
    return list(nodes.values())


def _shares_by_node(numa: list[_Node], shares: int, cores: int) -> list[int]:
    """Return how many whole lists each node provides: with the fewest siblings if possible."""
    total = shares * cores
    pool = set(_thread_after_thread(numa)[:total])
    exact = [sum(core in pool for threads in node for core in threads) // cores for node in numa]
    if sum(exact) == shares:
        return exact
    counts: list[int] = []
    for node in numa:
        fitting = sum(len(threads) for threads in node) // cores
        counts.append(min(fitting, shares - sum(counts)))
    return counts


def _thread_after_thread(numa: list[_Node]) -> list[int]:
    """Return the first hardware threads of all cores node by node, then the second ones, and so
    on."""
    longest = max((len(threads) for node in numa for threads in node), default=0)
    return [
        threads[level]
        for level in range(longest)
        for node in numa
        for threads in node
        if level < len(threads)
    ]


def _deal_node(node: _Node, shares: int, cores: int) -> list[list[int]]:
    """Divide one node: each list gets its own physical cores as long as there are enough."""
    if shares == 0:
        return []
    used = node[: shares * cores]
    bounds = [-(-share * len(used) // shares) for share in range(shares + 1)]
    dealt = [_thread_after_thread([used[low:high]])[:cores] for low, high in pairwise(bounds)]
    taken = {core for share in dealt for core in share}
    rest = iter([core for core in _thread_after_thread([node]) if core not in taken])
    return [share + [next(rest) for _ in range(cores - len(share))] for share in dealt]


# --- set a rank's cores and threads, equally under every launcher, and read them back ------------
#
# Launchers have different defaults (Spark exports OMP_NUM_THREADS=spark.task.cpus, torchrun 1, Open
# MPI binds ranks to cores), so `apply_resources` sets everything. It runs before torch is imported:
# OpenMP reads its variables once, and threads inherit the affinity of the thread that starts them.
# This module therefore does not import torch at the top.

_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_FIXED = {"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE"}
# Variables that would bind threads a second time, by other rules.
_REMOVED = (
    "OMP_PLACES", "OMP_PROC_BIND", "OMP_THREAD_LIMIT", "OMP_SCHEDULE", "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT", "KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET",
    "MKL_DOMAIN_NUM_THREADS", "OMP_STACKSIZE",
)  # fmt: skip
_RECORDED = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_")
_INTEROP_THREADS = 1
# Names of mallopt(3); -1 as a threshold means never.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_NEVER = -1
_USUAL_MMAP_MAX = 65536  # glibc's default
# Of blocks that malloc keeps for a strategy that divides the model: peak memory of gpt-small with
# 84 million parameters on two ranks is 2.1 GB if all are kept, and 1.5, 1.4 and 1.4 GB with limits
# of 1 MiB, 256 KiB and 64 KiB. Parameters and gradients of its units have 2 to 24 MB.
_LARGEST_KEPT_BYTES = 2**20
# Settings that were applied before the import of torch, for `actual_environment`.
_APPLIED: dict[str, bool] = {}


def apply_resources(context: RankContext, trial: Trial) -> None:
    """Set this process's affinity, thread variables and memory allocator, before torch is imported.

    Raises EnvironmentLacks, naming both numbers, if the node has fewer cores than the trial needs.
    """
    allowed = sorted(os.sched_getaffinity(0))
    # Only this rank's need: the quotas of the other ranks are known after the rendezvous.
    check_quotas(context, trial.placement, [RankCores.own()])
    os.sched_setaffinity(0, choose_cores(allowed, context, trial.placement))
    set_thread_variables(trial.placement.threads_per_worker)
    holds_model = STRATEGIES.get(trial.local_strategy).holds_whole_model
    keep_freed_memory(None if holds_model else _LARGEST_KEPT_BYTES)


def set_thread_variables(threads: int) -> None:
    """Set variables that libraries read once at import; no library starts threads at that time."""
    for name in _REMOVED:
        os.environ.pop(name, None)
    os.environ.update(dict.fromkeys(_THREAD_COUNTS, str(threads)), **_FIXED)


def keep_freed_memory(largest_bytes: int | None = None) -> bool:
    """Make malloc keep freed memory for the next step; return False if the C library is not glibc.

    largest_bytes: of the blocks that are kept; None: all. Where units of a model are gathered and
    released, larger ones must go back to the kernel: they would leave holes that fit no other unit.

    glibc's default maps and unmaps every large tensor, and the kernel clears the same pages in each
    step: on one core 15 to 25 % of a step of AlexNet (batch 32, 224x224), 20 % of VGG16's. Peak
    memory increases by 2 to 7 %.

    All threads allocate from one arena, because glibc unmaps those of other threads piece by piece
    whatever the settings. For two replicas in threads (AlexNet, batch 64) that cost 125,000 page
    faults a step, 10 to 15 % of it. Many replicas share the lock of that arena: each needs it in
    0.1 % of its step with AlexNet and 1 % with ResNet-101 (6,000 calls above 1 KiB, batch 4). So 64
    replicas would use it for two thirds of the time, and wait less than the page faults cost.
    """
    libc = ctypes.CDLL(None)
    is_glibc = hasattr(libc, "gnu_get_libc_version")
    keeps = is_glibc and bool(
        libc.mallopt(_M_MMAP_MAX, 0 if largest_bytes is None else _USUAL_MMAP_MAX)
        and (largest_bytes is None or libc.mallopt(_M_MMAP_THRESHOLD, largest_bytes))
        and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        and libc.mallopt(_M_ARENA_MAX, 1)
    )
    _APPLIED["keeps_freed_memory"] = keeps
    return keeps


def return_freed_memory() -> None:
    """Return the memory that is free now to the system, such as that of the first weights."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # of glibc
        libc.malloc_trim(0)


@dataclass(frozen=True, slots=True)
class RankCores:
    """A rank's cores, as published to the other ranks of its node."""

    affinity: list[int]
    quotas: dict[str, float]  # CPU quotas of its control groups, see `cpu_quotas`

    @classmethod
    def own(cls) -> RankCores:
        return cls(sorted(os.sched_getaffinity(0)), cpu_quotas())

    @classmethod
    def from_json(cls, text: str) -> RankCores:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def check_node(context: RankContext, placement: Placement, ranks: Sequence[RankCores]) -> None:
    """Raise EnvironmentLacks if ranks of a node share cores, or have fewer than their affinity
    suggests.

    With `oversubscribe` sharing is allowed. ranks: of this node, by local rank.
    """
    check_quotas(context, placement, ranks)
    if placement.oversubscribe:
        return
    cores = [core for rank in ranks for core in rank.affinity]
    shared = sorted({core for core in cores if cores.count(core) > 1})
    if shared:
        raise EnvironmentLacks(
            f"host {context.host}: the {context.ranks_on_node} ranks on it need "
            f"{placement.threads_per_rank * context.ranks_on_node} cores of their own, but share "
            f"cores {', '.join(map(str, shared))}: give the job more cores, or set "
            "oversubscribe = true"
        )


def check_quotas(context: RankContext, placement: Placement, ranks: Sequence[RankCores]) -> None:
    """Raise EnvironmentLacks if a control group limits the CPU of its `ranks` below their need.

    Under some launchers each rank has its own group, under others all ranks share one. A quota
    limits CPU time whatever the affinity is; with `oversubscribe` this is accepted.
    """
    if placement.oversubscribe:
        return
    for group, quota in {g: q for rank in ranks for g, q in rank.quotas.items()}.items():
        members = sum(group in rank.quotas for rank in ranks)
        wanted = members * placement.threads_per_rank
        if quota < wanted:
            who = f"rank {context.rank}" if members == 1 else f"{members} ranks on it"
            raise EnvironmentLacks(
                f"host {context.host}: {who} of {placement.threads_per_rank} threads need "
                f"{wanted} cores, their control group allows {quota:g}; raise the container's CPU "
                "limit, use fewer ranks or threads, or set oversubscribe = true"
            )


def set_threads(threads: int) -> None:
    """Set torch's thread pools: `threads` within an operation, one operation at a time.

    Raises EnvironmentLacks if torch has already started its inter-op pool.
    """
    import torch  # noqa: PLC0415  (after apply_resources)

    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != _INTEROP_THREADS:
        try:
            torch.set_num_interop_threads(_INTEROP_THREADS)
        except RuntimeError as error:
            raise EnvironmentLacks(
                f"expected to give torch {_INTEROP_THREADS} inter-op thread, but it has started "
                f"{torch.get_num_interop_threads()} already: {error}; run the trial in a fresh "
                "process"
            ) from error


def check_environment(found: RankEnvironment, trial: Trial) -> None:
    """Raise EnvironmentLacks if the environment of a rank differs from the request."""
    threads = (found.intraop_threads, found.interop_threads)
    check_rank(found.rank, trial, threads, found.affinity)
    check_workers(found.rank, trial, found.workers, found.affinity)


def actual_environment(
    context: RankContext,
    trial: Trial,
    *,
    clock_offset_s: float,
    clock_error_s: float,
    initial_weights_sha256: str = "",
    workers: Sequence[WorkerEnvironment] = (),
) -> RankEnvironment:
    """Return the environment of this rank, whatever was requested.

    workers: environments of the threads of strategy `threads`, each of which trains a replica.
    """
    import torch  # noqa: PLC0415  (after apply_resources)

    from paceline.train.training.devices import device_name, device_of  # noqa: PLC0415  (imports torch)

    affinity = sorted(os.sched_getaffinity(0))
    limits = read_limits()
    return RankEnvironment(
        rank=context.rank,
        world_size=context.world_size,
        local_rank=context.local_rank,
        node_index=context.node_index,
        host=context.host,
        pid=os.getpid(),
        intraop_threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        omp_environment={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_RECORDED)
        },
        affinity=affinity,
        cgroup_cpu_limit=limits.cpus,
        cgroup_memory_limit_bytes=limits.memory_bytes,
        cpu_model=cpu_model(),
        precision=trial.training.precision,
        memory_format=trial.training.memory_format,
        transport=trial.transport,
        interface=trial.interface,
        clock_offset_s=clock_offset_s,
        clock_error_s=clock_error_s,
        versions=package_versions(),
        initial_weights_sha256=initial_weights_sha256,
        device=device_name(device_of(trial, context)),
        numa_nodes=numa_nodes_of(affinity),
        dilation=own_dilation(),
        link=trial.link or os.environ.get(LINK_VARIABLE),
        workers=list(workers),
        keeps_freed_memory=_APPLIED.get("keeps_freed_memory"),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


def check_rank(rank: int, trial: Trial, threads: tuple[int, int], affinity: Sequence[int]) -> None:
    """Raise EnvironmentLacks unless a rank has the threads and cores that `trial` gives it.

    threads: torch's intra-op threads in the main thread, and its inter-op threads.
    """
    expected = (trial.placement.threads_per_worker, _INTEROP_THREADS)
    if threads != expected:
        raise EnvironmentLacks(
            f"rank {rank}: expected {expected[0]} intra-op and {expected[1]} inter-op threads, "
            f"torch has {threads[0]} and {threads[1]}"
        )
    cores = trial.placement.threads_per_rank
    if not trial.placement.oversubscribe and len(affinity) != cores:
        raise EnvironmentLacks(
            f"rank {rank}: expected to run on {cores} cores, its affinity is {list(affinity)}"
        )


def check_workers(
    rank: int, trial: Trial, workers: Sequence[WorkerEnvironment], affinity: Sequence[int]
) -> None:
    """Raise EnvironmentLacks unless each replica's thread has its own cores, and all threads exist.

    affinity: that of the rank.
    """
    expected = trial.placement.replicas_per_rank if trial.placement.replicas_per_rank > 1 else 0
    if len(workers) != expected:
        raise EnvironmentLacks(
            f"rank {rank}: expected {expected} threads with a replica each, found {len(workers)}"
        )
    threads = trial.placement.threads_per_worker
    taken: set[int] = set()
    for worker in workers:
        who = f"rank {rank}, replica {worker.worker}"
        own = set(worker.affinity)
        if worker.intraop_threads != threads:
            raise EnvironmentLacks(
                f"{who}: expected {threads} intra-op threads, torch has {worker.intraop_threads}"
            )
        if not own <= set(affinity):
            raise EnvironmentLacks(
                f"{who}: expected cores out of its rank's {list(affinity)}, its affinity is "
                f"{worker.affinity}"
            )
        if trial.placement.oversubscribe:
            continue
        if len(own) != threads or own & taken:
            raise EnvironmentLacks(
                f"{who}: expected {threads} cores of its own, its affinity is {worker.affinity}; "
                f"other replicas have {sorted(taken)}"
            )
        taken |= own
