"""Sum gradient shards over nodes, within the replicate group of each shard.

A replicate group is the inter-node process group of the ranks that own the same shard: those with
the same local rank on each node. (In hybrid sharded data parallelism, FSDP calls this dimension of
the device mesh "replicate".)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import EnvironmentLacks
from paceline.collectives.node.memory import gather
from paceline.measure.records.communication import StrategyResult
from paceline.plan.costs import all_reduce_bytes
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.training.strategy import RankGroups
from paceline.train.transports.bucket_settings import gradient_options_of
from paceline.train.transports.bucket_sums import FlatBucket, GradientSum, create_sum, pack


def group_by_local_rank(places: Mapping[int, tuple[int, int]]) -> list[list[int]]:
    """Return the ranks of each local rank, ordered by node.

    places: rank -> (node index, local rank), because launchers number ranks in different orders.
    Raises EnvironmentLacks if a node lacks a local rank.
    """
    by_place = {place: rank for rank, place in places.items()}
    nodes = sorted({node for node, _ in by_place})
    local_ranks = sorted({local for _, local in by_place})
    missing = [(n, r) for n in nodes for r in local_ranks if (n, r) not in by_place]
    if missing:
        raise EnvironmentLacks(
            f"expected {len(local_ranks)} ranks on each of {len(nodes)} nodes, but node "
            f"{missing[0][0]} has no local rank {missing[0][1]}: start the same number of ranks on "
            "every node"
        )
    return [[by_place[node, local] for node in nodes] for local in local_ranks]


class ReplicateGroup:
    """Sums this rank's gradient shards over its replicate group, with the compression of the trial.

    On a single node it does nothing. Without compression each tensor is one all-reduce. With
    compression, tensors are copied into buckets of at most `bucket_mb`, which are summed one after
    the other.
    """

    def __init__(self, trial: Trial | None = None, group: dist.ProcessGroup | None = None) -> None:
        """trial: None means a single node. group: process group; None means all ranks."""
        self._trial = None if trial is None or trial.placement.nodes == 1 else trial
        self.group = group
        self._gradient_sum: GradientSum | None = None
        if self._trial is not None and gradient_options_of(self._trial).compression is not None:
            self._gradient_sum = create_sum(self._trial, group)
        self._buckets: list[FlatBucket] | None = None
        self._sizes_bytes: list[int] = []

    @classmethod
    def join(cls, trial: Trial, context: RankContext, peers: RankGroups) -> ReplicateGroup:
        """Return the replicate group of this rank; collective over all ranks: torch requires every
        rank to create every group in the same order.

        Raises EnvironmentLacks if nodes have different numbers of ranks.
        """
        if trial.placement.nodes == 1:
            return cls(trial)
        limit_s = trial.limits.collective_s
        own: dist.ProcessGroup | None = None
        for ranks in group_by_local_rank(_rank_places(context, peers, limit_s)):
            group = None
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=timedelta(seconds=limit_s))
            if context.rank in ranks:
                own = group
        return cls(trial, own)

    def all_reduce(self, gradients: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
        """Sum each gradient in place; all ranks of the group pass the same ones in every step.

        gradients: each of shape (elements,). shapes: their shapes as matrices where they have whole
        rows, for low-rank compression.
        """
        if self._trial is None:
            return
        self._sizes_bytes = [g.nbytes for g in gradients]
        if self._gradient_sum is None:
            all_reduce_tensors(gradients, self.group)
            return
        if self._buckets is None:
            bucket_bytes = gradient_options_of(self._trial).bucket_mb * 2**20
            self._buckets = pack(shapes, bucket_bytes, gradients[0].device)
        starts = itertools.accumulate((len(b.gradients()) for b in self._buckets), initial=0)
        parts = [gradients[low:high] for low, high in itertools.pairwise(starts)]
        sums = []
        for bucket, part in zip(self._buckets, parts, strict=True):
            bucket.fill(part)
            sums.append(self._gradient_sum.start(bucket))
        for bucket, part, summed in zip(self._buckets, parts, sums, strict=True):
            summed.wait()
            bucket.empty_into(part)

    def sum_vector(self, values: Tensor) -> None:
        """Sum a small vector in place over the group; nothing to do on a single node."""
        if self._trial is not None:
            dist.all_reduce(values, group=self.group)

    def describe(self) -> StrategyResult:
        """Return sizes and traffic; empty on a single node."""
        if self._trial is None:
            return {}
        if self._gradient_sum is not None:
            return {"bucket_bytes": self._sizes_bytes, **self._gradient_sum.describe()}
        return traffic_of(self._sizes_bytes, dist.get_world_size(self.group))

    def close(self, *, failed: bool) -> None:
        if self._gradient_sum is not None:
            self._gradient_sum.close(failed=failed)


def traffic_of(sizes_bytes: list[int], ranks: int) -> StrategyResult:
    """Return the sizes of messages, and what each of so many ranks sends to sum them."""
    sent = round(all_reduce_bytes(sum(sizes_bytes), ranks))
    return {
        "bucket_bytes": sizes_bytes,
        "sent_bytes_per_step": sent,
        "uncompressed_bytes_per_step": sent,
    }


def all_reduce_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum each tensor in place over a group's ranks, or over all ranks without a group.

    All ranks pass tensors of the same sizes in the same order.
    """
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()


def _rank_places(
    context: RankContext, peers: RankGroups, limit_s: float
) -> dict[int, tuple[int, int]]:
    own = f"{context.node_index} {context.local_rank}"
    places = gather(peers.world("replicate groups"), own, limit_s)
    published = [place.split() for place in places]
    return {rank: (int(node), int(local)) for rank, (node, local) in enumerate(published)}
