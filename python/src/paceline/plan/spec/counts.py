"""Counts of ranks, threads, replicas and stages on a node.

A given number stands. A number that follows from the given ones is computed from them. Only what
is then still open depends on the node's cores. The local strategies' descriptors say how.
"""

from __future__ import annotations

from paceline.base.errors import UsageError
from paceline.plan.spec.extensions import STRATEGIES
from paceline.plan.spec.models import TrialRequest
from paceline.plan.spec.placement import NodeCounts
from paceline.plan.spec.values import BEST

_FEW_CORES, _MANY_CORES = 1, 2**20


def counts_on_node(request: TrialRequest, cores: int) -> NodeCounts:
    """Return the counts on a node with `cores` cores, for a request without faults.

    Raises UsageError for "best", which a search has to find first.
    """
    if request.local_strategy == BEST:
        raise UsageError(
            'local_strategy: "best" is the result of a search; run `paceline tune local SPEC`, '
            "then the spec that it writes"
        )
    return STRATEGIES.get(request.local_strategy).counts(request, cores)


def counts_if_known(request: TrialRequest) -> NodeCounts | None:
    """Return the counts if they do not depend on the node's cores, else None.

    Counts grow with the cores, so they do not depend on them if one core and very many give the
    same.
    """
    if request.local_strategy == BEST:
        return None
    few = counts_on_node(request, _FEW_CORES)
    return few if few == counts_on_node(request, _MANY_CORES) else None


def number(count: int | str | None) -> int | None:
    """Return a count that was given as a number; None for "auto" and where nothing was given."""
    return count if isinstance(count, int) else None


def batch_per_replica(global_batch: int, replicas: int) -> int:
    """Return the samples of a full batch that each replica of all nodes gets.

    Raises UsageError if the batch cannot be divided equally.
    """
    if global_batch % replicas:
        raise UsageError(
            f"a global batch of {global_batch} cannot be divided among {replicas} replicas; "
            f"use a multiple of {replicas}, for example "
            f"{-(-global_batch // replicas) * replicas}"
        )
    return global_batch // replicas


def divisors(cores: int) -> list[int]:
    """Return the divisors from two up: numbers of workers that get equally many cores."""
    return [count for count in range(2, cores + 1) if cores % count == 0]
