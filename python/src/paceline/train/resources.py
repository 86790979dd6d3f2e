"""Gives a rank its cores and threads, the same under every launcher, and reads them back.

Launchers disagree by default (Spark exports OMP_NUM_THREADS=spark.task.cpus, torchrun 1, Open MPI
binds ranks to cores), so `apply_resources` sets everything anew. It runs before torch is imported:
OpenMP reads its variables once, and threads inherit the affinity of whoever starts them. This
module therefore does not import torch at its top.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.records.cgroups import read_limits
from paceline.records.machine import cpu_model, package_versions
from paceline.records.rows import RankEnvironment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Placement, Trial
    from paceline.train.context import RankContext

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
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1


def apply_resources(context: RankContext, trial: Trial) -> None:
    """Set this process's affinity, thread variables and memory allocator; before torch is imported.

    Raises EnvironmentLacks, naming both numbers, if the node has fewer cores than the trial asks.
    """
    placement = trial.placement
    allowed = sorted(os.sched_getaffinity(0))
    if not placement.oversubscribe:
        _check_quota(context, placement)
    os.sched_setaffinity(0, choose_cores(allowed, context, placement))
    set_thread_variables(placement.threads_per_rank)
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
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def choose_cores(allowed: Sequence[int], context: RankContext, placement: Placement) -> list[int]:
    """The cores of one rank, out of those that this process may use, in ascending order.

    The node's cores are dealt out in ascending order of their numbers, threads_per_rank to each
    local rank. Where the launcher has already bound each rank (as `mpirun --bind-to core` does),
    the rank keeps to its own cores. With `oversubscribe`, ranks share all cores.
    Raises EnvironmentLacks if there are too few.
    """
    threads = placement.threads_per_rank
    if placement.oversubscribe:
        return list(allowed)
    if len(allowed) >= context.ranks_on_node * threads:
        first = context.local_rank * threads
        return list(allowed[first : first + threads])
    if len(allowed) >= threads and context.ranks_on_node > 1:
        return list(allowed[:threads])  # bound by the launcher; check_disjoint finds if wrongly
    raise EnvironmentLacks(
        f"host {context.host}: {context.ranks_on_node} ranks of {threads} threads need "
        f"{context.ranks_on_node * threads} cores, rank {context.rank} may use {len(allowed)} "
        f"({', '.join(map(str, allowed))}); ask for fewer ranks or threads, give the job more "
        "cores, or set oversubscribe = true"
    )


def check_disjoint(
    context: RankContext, placement: Placement, affinities: Sequence[Sequence[int]]
) -> None:
    """Raise EnvironmentLacks if ranks of this node share cores without `oversubscribe`.

    affinities: of the node's ranks, by local rank.
    """
    if placement.oversubscribe:
        return
    cores = [core for affinity in affinities for core in affinity]
    shared = sorted({core for core in cores if cores.count(core) > 1})
    if shared:
        raise EnvironmentLacks(
            f"host {context.host}: the {context.ranks_on_node} ranks on it need "
            f"{placement.threads_per_rank * context.ranks_on_node} cores of their own, but share "
            f"cores {', '.join(map(str, shared))}: give the job more cores, or set "
            "oversubscribe = true"
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
) -> RankEnvironment:
    """What this rank really has. Raises EnvironmentLacks if that is not what was asked."""
    import torch  # noqa: PLC0415  (after apply_resources)

    threads = trial.placement.threads_per_rank
    found = (torch.get_num_threads(), torch.get_num_interop_threads())
    affinity = sorted(os.sched_getaffinity(0))
    if found != (threads, _INTEROP_THREADS):
        raise EnvironmentLacks(
            f"rank {context.rank}: expected {threads} intra-op and {_INTEROP_THREADS} inter-op "
            f"threads, torch has {found[0]} and {found[1]}"
        )
    if not trial.placement.oversubscribe and len(affinity) != threads:
        raise EnvironmentLacks(
            f"rank {context.rank}: expected to run on {threads} cores, its affinity is {affinity}"
        )
    limits = read_limits()
    return RankEnvironment(
        rank=context.rank,
        world_size=context.world_size,
        local_rank=context.local_rank,
        node_index=context.node_index,
        host=context.host,
        pid=os.getpid(),
        intraop_threads=found[0],
        interop_threads=found[1],
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
    )


def _check_quota(context: RankContext, placement: Placement) -> None:
    """Cores that a control group withholds are not there, whatever the affinity says."""
    quota = read_limits().cpus
    # This rank's own share only: under some launchers each rank has a control group of its own.
    if quota is not None and quota < placement.threads_per_rank:
        raise EnvironmentLacks(
            f"host {context.host}: rank {context.rank} needs {placement.threads_per_rank} cores, "
            f"its control group allows {quota:g}; raise the container's CPU limit, ask for fewer "
            "threads, or set oversubscribe = true"
        )
