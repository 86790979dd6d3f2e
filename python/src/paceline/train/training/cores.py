"""Assign a node's cores to its ranks, and a rank's cores to its workers.

Every rank computes the same assignment from the same facts, without communication. Physical cores
are used before second hardware threads (SMT siblings), a rank's cores lie on one NUMA node if they
fit, and consecutive ranks fill node after node, so that pipeline neighbours are close to each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.topology import SYSTEM, PhysicalCore, physical_cores
from paceline.plan.trials.rank_context import RankContext
from paceline.plan.trials.trial import Placement

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
