"""How many ranks, threads, replicas and stages a trial has on each node.

A number that is given stands, one that follows from those given is worked out from them, and only
what is then still open depends on the node's cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.spec.models import TrialRequest
    from paceline.spec.values import LocalStrategy

DEFAULT_HYBRID_STAGES = 2
# Keeps the bubble (s - 1) / (m + s - 1) under a fifth (Huang et al., GPipe, section 2.3:
# negligible from four micro-batches a stage on).
DEFAULT_MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCounts:
    """What one node gets."""

    ranks: int
    threads_per_rank: int
    replicas: int = 1  # copies of the model on the node
    stages: int = 1  # ranks of one copy


class _OpenError(Exception):
    """The cores would have to be known."""


def counts_on_node(request: TrialRequest, cores: int) -> NodeCounts:
    """The counts on a node of so many cores, for a request that `rules` finds no fault with.

    Raises UsageError for "best", which a search has to find first.
    """
    if request.local_strategy == "best":
        raise UsageError(
            'local_strategy: "best" is what a search finds; run `paceline tune local SPEC`, then '
            "the spec that it writes"
        )
    return _COUNTS[request.local_strategy](request, lambda: cores)


def counts_if_known(request: TrialRequest) -> NodeCounts | None:
    """The same where the request alone says it all, else None."""

    if request.local_strategy == "best":
        return None

    def unknown() -> int:
        raise _OpenError

    try:
        return _COUNTS[request.local_strategy](request, unknown)
    except _OpenError:
        return None


def number(count: int | str | None) -> int | None:
    """A count that was given as a number; None for "auto" and where nothing was given."""
    return count if isinstance(count, int) else None


def stages_given(request: TrialRequest) -> int | None:
    """Stages as a number or as one more than the split points, None if neither is given."""
    return number(request.stages) or (
        None if request.split_points is None else len(request.split_points) + 1
    )


def share_of(global_batch: int, replicas: int) -> int:
    """Samples of a full batch that each of all nodes' replicas gets.

    Raises UsageError if they cannot be shared out equally.
    """
    if global_batch % replicas:
        raise UsageError(
            f"a global batch of {global_batch} cannot be divided among {replicas} replicas; "
            f"use a multiple of {replicas}, say {-(-global_batch // replicas) * replicas}"
        )
    return global_batch // replicas


def check_micro_batches(micro_batches: int | None, share: int) -> None:
    """Raise UsageError if a replica's share of a batch has fewer samples than micro-batches."""
    if micro_batches is not None and micro_batches > share:
        raise UsageError(
            f"micro_batches: a replica's share of a batch is {share} sample(s), expected at most "
            f'as many, got {micro_batches}; use {share}, "auto", or a larger global_batch'
        )


def default_micro_batches(stages: int, share: int) -> int:
    return min(DEFAULT_MICRO_BATCHES_PER_STAGE * stages, share)


def _sequential(_request: TrialRequest, _cores: Callable[[], int]) -> NodeCounts:
    return NodeCounts(ranks=1, threads_per_rank=1)


def _intraop(request: TrialRequest, cores: Callable[[], int]) -> NodeCounts:
    return NodeCounts(ranks=1, threads_per_rank=number(request.threads_per_rank) or cores())


def _threads(request: TrialRequest, cores: Callable[[], int]) -> NodeCounts:
    threads = number(request.threads_per_rank)
    replicas = number(request.replicas) or threads or max(2, cores())
    return NodeCounts(ranks=1, threads_per_rank=threads or replicas, replicas=replicas)


def _processes(request: TrialRequest, cores: Callable[[], int]) -> NodeCounts:
    threads = number(request.threads_per_rank) or 1
    given = number(request.ranks_per_node) or number(request.replicas)
    ranks = given or max(2, cores() // threads)
    return NodeCounts(ranks=ranks, threads_per_rank=threads, replicas=ranks)


def _pipeline(request: TrialRequest, cores: Callable[[], int]) -> NodeCounts:
    threads = number(request.threads_per_rank) or 1
    given = stages_given(request) or number(request.ranks_per_node)
    stages = given or max(2, cores() // threads)
    return NodeCounts(ranks=stages, threads_per_rank=threads, stages=stages)


def _hybrid(request: TrialRequest, cores: Callable[[], int]) -> NodeCounts:
    threads = number(request.threads_per_rank) or 1
    ranks, replicas = number(request.ranks_per_node), number(request.replicas)
    stages = stages_given(request)
    if stages is None:
        stages = ranks // replicas if ranks and replicas else DEFAULT_HYBRID_STAGES
    if replicas is None:
        replicas = ranks // stages if ranks else max(2, cores() // (stages * threads))
    return NodeCounts(
        ranks=replicas * stages, threads_per_rank=threads, replicas=replicas, stages=stages
    )


_COUNTS: dict[LocalStrategy, Callable[[TrialRequest, Callable[[], int]], NodeCounts]] = {
    "sequential": _sequential,
    "intraop": _intraop,
    "threads": _threads,
    "processes": _processes,
    "pipeline": _pipeline,
    "hybrid": _hybrid,
}
