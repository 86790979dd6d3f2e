"""Deals a node's cores out to its ranks, and a rank's to its workers.

Every rank computes the same from the same facts, without asking the others. Whole cores come
before second hardware threads (SMT siblings), a rank's cores lie on one NUMA node where they fit,
and consecutive ranks fill node after node, so that a pipeline's neighbours are near each other.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.topology import SYSTEM, PhysicalCore, physical_cores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.plan.trial import Placement
    from paceline.training.context import RankContext


# A NUMA node's physical cores, each as its hardware threads
_Node = list[tuple[int, ...]]


def choose_cores(
    allowed: Sequence[int], context: RankContext, placement: Placement, root: Path = SYSTEM
) -> list[int]:
    """The cores of one rank, out of those that this process may use, in ascending order.

    Where the launcher has already bound each rank (as `mpirun --bind-to core` does), the rank keeps
    to its own cores. With `oversubscribe`, ranks share all cores, or as many as the core budget
    says. Raises EnvironmentLacks if there are too few.
    """
    threads = placement.threads_per_rank
    if placement.oversubscribe:
        shared = min(placement.core_budget or len(allowed), len(allowed))
        return deal(allowed, 1, shared, root)[0]
    if len(allowed) >= context.ranks_on_node * threads:
        return deal(allowed, context.ranks_on_node, threads, root)[context.local_rank]
    if len(allowed) >= threads and context.ranks_on_node > 1:
        # bound by the launcher; check_node finds if wrongly
        return deal(allowed, 1, threads, root)[0]
    raise EnvironmentLacks(
        f"host {context.host}: {context.ranks_on_node} ranks of {threads} threads need "
        f"{context.ranks_on_node * threads} cores, rank {context.rank} may use {len(allowed)} "
        f"({', '.join(map(str, allowed))}); ask for fewer ranks or threads, give the job more "
        "cores, or set oversubscribe = true"
    )


def worker_cores(
    affinity: Sequence[int], worker: int, workers: int, oversubscribe: bool, root: Path = SYSTEM
) -> list[int]:
    """The cores of one of a rank's worker threads, out of the rank's own, in ascending order.

    With `oversubscribe`, all of them. Raises EnvironmentLacks if there are fewer than workers.
    """
    if oversubscribe:
        return sorted(affinity)
    if len(affinity) < workers:
        raise EnvironmentLacks(
            f"{workers} replicas of a rank need a core each, the rank has {len(affinity)} "
            f"({', '.join(map(str, affinity))}); ask for fewer replicas or set oversubscribe = true"
        )
    return deal(affinity, workers, len(affinity) // workers, root)[worker]


def deal(allowed: Sequence[int], shares: int, cores: int, root: Path = SYSTEM) -> list[list[int]]:
    """`shares` disjoint lists of `cores` core numbers out of `allowed`, each ascending.

    There must be enough. How many hardware threads of a core are used at most is what the total
    needs, so all ways of sharing a node out between as many cores get the same kind of cores.
    """
    assert len(allowed) >= shares * cores, (allowed, shares, cores)
    physical = physical_cores(allowed, root)
    depth = _depth(physical, shares * cores)
    numa = _by_numa_node([core.threads[:depth] for core in physical], physical)
    dealt: list[list[int]] = []
    for node, count in zip(numa, _shares_by_node(numa, shares, cores), strict=True):
        dealt += _deal_node(node, count, cores)
    taken = {core for share in dealt for core in share}
    rest = [core for core in _thread_after_thread(numa) if core not in taken]
    # What fits on no node as a whole takes what is left on several.
    dealt += [rest[i * cores : (i + 1) * cores] for i in range(shares - len(dealt))]
    return [sorted(share) for share in dealt]


def _depth(physical: Sequence[PhysicalCore], wanted: int) -> int:
    """The fewest hardware threads a core with which `wanted` are there."""
    depth = 1
    while sum(len(core.threads[:depth]) for core in physical) < wanted:
        depth += 1
    return depth


def _by_numa_node(threads: list[tuple[int, ...]], physical: Sequence[PhysicalCore]) -> list[_Node]:
    nodes: dict[int | None, _Node] = {}
    for core, used in zip(physical, threads, strict=True):
        nodes.setdefault(core.numa_node, []).append(used)
    return list(nodes.values())


def _shares_by_node(numa: list[_Node], shares: int, cores: int) -> list[int]:
    """How many whole shares each node gives: first with the fewest siblings, else as fits."""
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
    """First hardware threads of all cores, node by node, then second ones, and so on."""
    longest = max((len(threads) for node in numa for threads in node), default=0)
    return [
        threads[level]
        for level in range(longest)
        for node in numa
        for threads in node
        if level < len(threads)
    ]


def _deal_node(node: _Node, shares: int, cores: int) -> list[list[int]]:
    """Shares of one node: each gets physical cores of its own, as long as there are some."""
    if shares == 0:
        return []
    used = node[: shares * cores]
    bounds = [-(-share * len(used) // shares) for share in range(shares + 1)]
    dealt = []
    for low, high in pairwise(bounds):
        dealt.append(_thread_after_thread([used[low:high]])[:cores])
    taken = {core for share in dealt for core in share}
    rest = iter([core for core in _thread_after_thread([node]) if core not in taken])
    return [share + [next(rest) for _ in range(cores - len(share))] for share in dealt]
