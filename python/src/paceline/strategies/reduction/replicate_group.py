"""Sums over nodes: the ranks that have the same local rank on each node, and so the same slice."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.errors import EnvironmentLacks
from paceline.transports.compression.base import all_reduce_bytes
from paceline.transports.compression.create import create_sum
from paceline.transports.compression.flat_bucket import FlatBucket, pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paceline.plan.trial import Trial
    from paceline.training.context import RankContext
    from paceline.training.strategy import RankGroups
    from paceline.transports.compression.base import GradientSum


def join_replicate_group(
    context: RankContext, peers: RankGroups, limit_s: float
) -> dist.ProcessGroup | None:
    """The group of this rank's counterparts; None on a single node.

    Collective over all ranks: torch wants every rank to make every group, in the same order.
    limit_s: of each wait. Raises EnvironmentLacks if nodes have different numbers of ranks.
    """
    own = None
    for ranks in group_by_local_rank(_places(context, peers, limit_s)):
        group = (
            dist.new_group(ranks, timeout=timedelta(seconds=limit_s)) if len(ranks) > 1 else None
        )
        if context.rank in ranks:
            own = group
    return own


def group_by_local_rank(places: Mapping[int, tuple[int, int]]) -> list[list[int]]:
    """Ranks with the same local rank, by node, for each local rank.

    places: rank -> (node index, local rank); launchers number ranks as they like.
    Raises EnvironmentLacks if some node has no rank of a local rank.
    """
    by_place = {place: rank for rank, place in places.items()}
    nodes = sorted({node for node, _ in by_place})
    local_ranks = sorted({local for _, local in by_place})
    missing = [(n, r) for n in nodes for r in local_ranks if (n, r) not in by_place]
    if missing:
        raise EnvironmentLacks(
            f"expected {len(local_ranks)} ranks on each of {len(nodes)} nodes, but node "
            f"{missing[0][0]} has no local rank {missing[0][1]}: start as many on every node"
        )
    return [[by_place[node, local] for node in nodes] for local in local_ranks]


class ReplicateGroup:
    """Sums this rank's slice of the gradients over its counterparts, as the trial says.

    Without compression each tensor is one all-reduce. With it, they are copied into buckets of at
    most `bucket_mb`, which are summed one after the other.
    """

    def __init__(self, trial: Trial, group: dist.ProcessGroup | None = None) -> None:
        """group: None for all ranks."""
        self._group = group
        self._bucket_bytes = trial.bucket_mb * 2**20
        self._total: GradientSum | None = None
        if trial.compression is not None:
            self._total = create_sum(trial, group)
        self._buckets: list[FlatBucket] | None = None
        self._sizes_bytes: list[int] = []

    def sum(self, gradients: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
        """Sum each, in place; all counterparts come with the same ones, in every step.

        gradients: of each, shape (elements,). shapes: what they are parts of, as far as it is whole
        rows; compression by rank looks at those.
        """
        self._sizes_bytes = [g.numel() * g.element_size() for g in gradients]
        if self._total is None:
            all_reduce_tensors(gradients, self._group)
            return
        if self._buckets is None:
            self._buckets = pack(shapes, self._bucket_bytes, gradients[0].device)
        starts = itertools.accumulate((len(b.gradients()) for b in self._buckets), initial=0)
        parts = [gradients[low:high] for low, high in itertools.pairwise(starts)]
        sums = []
        for bucket, part in zip(self._buckets, parts, strict=True):
            bucket.fill(part)
            sums.append(self._total.start(bucket))
        for bucket, part, summed in zip(self._buckets, parts, sums, strict=True):
            summed.wait()
            bucket.empty_into(part)

    def describe(self) -> dict[str, Any]:
        if self._total is not None:
            return {"bucket_bytes": self._sizes_bytes, **self._total.describe()}
        sent = round(all_reduce_bytes(sum(self._sizes_bytes), dist.get_world_size(self._group)))
        return {
            "bucket_bytes": self._sizes_bytes,
            "sent_bytes_per_step": sent,
            "uncompressed_bytes_per_step": sent,
        }

    def close(self, *, failed: bool) -> None:
        if self._total is not None:
            self._total.close(failed=failed)


def all_reduce_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum each tensor, in place, over a group's ranks, which all come with the same; without a
    group, over all ranks."""
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()


def _places(context: RankContext, peers: RankGroups, limit_s: float) -> dict[int, tuple[int, int]]:
    world = peers.world("counterparts")
    if world is None:
        return {context.rank: (context.node_index, context.local_rank)}
    world.publish(str(context.rank), f"{context.node_index} {context.local_rank}")
    published = [world.lookup(str(r), limit_s).split() for r in range(context.world_size)]
    return {rank: (int(node), int(local)) for rank, (node, local) in enumerate(published)}
