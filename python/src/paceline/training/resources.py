"""Gives a rank its cores and threads, the same under every launcher, and reads them back.

Launchers disagree by default (Spark exports OMP_NUM_THREADS=spark.task.cpus, torchrun 1, Open MPI
binds ranks to cores), so `apply_resources` sets everything anew. It runs before torch is imported:
OpenMP reads its variables once, and threads inherit the affinity of whoever starts them. This
module therefore does not import torch at its top.
"""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.cgroups import cpu_quotas, read_limits
from paceline.host.machine import cpu_model, package_versions
from paceline.host.topology import numa_nodes_of
from paceline.records.rows import RankEnvironment
from paceline.training.cores import choose_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Placement, Trial
    from paceline.records.rows import WorkerEnvironment
    from paceline.training.context import RankContext

_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_FIXED = {"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE"}
# Bind threads a second time, by other rules than ours.
_REMOVED = (
    "OMP_PLACES", "OMP_PROC_BIND", "OMP_THREAD_LIMIT", "OMP_SCHEDULE", "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT", "KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET",
    "MKL_DOMAIN_NUM_THREADS", "OMP_STACKSIZE",
)  # fmt: skip
_RECORDED = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_")
_INTEROP_THREADS = 1
# What the manual page of mallopt calls them; -1 as a threshold means never.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = -1
# What this process was given before torch came, for `read_back`.
_KEEPS_FREED_MEMORY = "keeps_freed_memory"
_APPLIED: dict[str, bool] = {}


def apply_resources(context: RankContext, trial: Trial) -> None:
    """Set this process's affinity, thread variables and memory allocator; before torch is imported.

    Raises EnvironmentLacks, naming both numbers, if the node has fewer cores than the trial asks.
    """
    allowed = sorted(os.sched_getaffinity(0))
    # The rank's own need only: what its neighbours get of the same groups is known once they meet.
    check_quotas(context, trial.placement, [RankCores.own()])
    os.sched_setaffinity(0, choose_cores(allowed, context, trial.placement))
    set_thread_variables(trial.threads_per_worker)
    keep_freed_memory()


def set_thread_variables(threads: int) -> None:
    """Set what libraries read once, when they are imported; no library starts a thread then."""
    for name in _REMOVED:
        os.environ.pop(name, None)
    os.environ.update(dict.fromkeys(_THREAD_COUNTS, str(threads)), **_FIXED)


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed for the next step; False where the C library is not glibc.

    Otherwise glibc maps every large tensor anew and gives it back, and the kernel clears the same
    pages in each step: on one core 15 to 25 % of a step of AlexNet (batch 32, 224x224), 20 % of
    VGG16's. Peak memory rises by 2 to 7 % there.
    All threads allocate from one arena: glibc unmaps those of other threads than the first piece by
    piece whatever it is told, which cost two replicas in threads (AlexNet, batch 64) 125,000 page
    faults a step, 10 to 15 % of it.
    """
    libc = ctypes.CDLL(None)
    is_glibc = hasattr(libc, "gnu_get_libc_version")
    keeps = is_glibc and bool(
        libc.mallopt(_M_MMAP_MAX, 0)
        and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        and libc.mallopt(_M_ARENA_MAX, 1)
    )
    _APPLIED[_KEEPS_FREED_MEMORY] = keeps
    return keeps


@dataclass(frozen=True, slots=True)
class RankCores:
    """What a rank tells the others of its node about its cores."""

    affinity: list[int]
    quotas: dict[str, float]  # of the control groups that it is in, see `cpu_quotas`

    @classmethod
    def own(cls) -> RankCores:
        return cls(sorted(os.sched_getaffinity(0)), cpu_quotas())

    @classmethod
    def from_json(cls, text: str) -> RankCores:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def check_node(context: RankContext, placement: Placement, ranks: Sequence[RankCores]) -> None:
    """Raise EnvironmentLacks if a node's ranks share cores, or have not as many as they look.

    With `oversubscribe` they may. ranks: of this node, by local rank.
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
    """Raise EnvironmentLacks if a control group withholds cores from `ranks`, those in it together.

    Under some launchers each rank has a group of its own, under others all share one. Cores that a
    group withholds are not there, whatever the affinity says; with `oversubscribe` that is wanted.
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
                "limit, ask for fewer ranks or threads, or set oversubscribe = true"
            )


def set_threads(threads: int) -> None:
    """Set torch's own pools: `threads` within an operation, one operation at a time.

    Raises EnvironmentLacks if torch has already started its pool between operations.
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


def read_back(
    context: RankContext,
    trial: Trial,
    *,
    clock_offset_s: float,
    clock_error_s: float,
    initial_weights_sha256: str,
    workers: Sequence[WorkerEnvironment] = (),
) -> RankEnvironment:
    """What this rank really has. Raises EnvironmentLacks if that is not what was asked.

    workers: what the threads that train replicas of their own found, for `threads`.
    """
    import torch  # noqa: PLC0415  (after apply_resources)

    from paceline.training.devices import device_name, device_of  # noqa: PLC0415  (imports torch)

    threads = (torch.get_num_threads(), torch.get_num_interop_threads())
    affinity = sorted(os.sched_getaffinity(0))
    check_rank(context.rank, trial, threads, affinity)
    check_workers(context.rank, trial, workers, affinity)
    limits = read_limits()
    return RankEnvironment(
        rank=context.rank,
        world_size=context.world_size,
        local_rank=context.local_rank,
        node_index=context.node_index,
        host=context.host,
        pid=os.getpid(),
        intraop_threads=threads[0],
        interop_threads=threads[1],
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
        workers=list(workers),
        keeps_freed_memory=_APPLIED.get(_KEEPS_FREED_MEMORY),
    )


def check_rank(rank: int, trial: Trial, threads: tuple[int, int], affinity: Sequence[int]) -> None:
    """Raise EnvironmentLacks unless a rank has what `trial` gives it.

    threads: torch's within an operation, in the main thread, and between operations.
    """
    expected = (trial.threads_per_worker, _INTEROP_THREADS)
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
    """Raise EnvironmentLacks unless each replica's thread has cores of its own, and all are there.

    affinity: the rank's.
    """
    expected = trial.thread_replicas if trial.thread_replicas > 1 else 0
    if len(workers) != expected:
        raise EnvironmentLacks(
            f"rank {rank}: expected {expected} threads with a replica each, found {len(workers)}"
        )
    threads = trial.threads_per_worker
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
