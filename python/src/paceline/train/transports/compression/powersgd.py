"""PyTorch's PowerSGD hook as a compressor.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization (NeurIPS 2019): a gradient matrix (n, m) is sent as two factors (n, r) and (m, r).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from paceline.collectives.work import PendingWork
from paceline.measure.records.communication import CompressionResult
from paceline.plan.costs.link_cost import all_reduce_bytes
from paceline.train.transports.compression.bucket import Bucket, Numbers

# DistributedDataParallel rebuilds its buckets after the first step, and the hook keeps its state by
# bucket; it refuses to start earlier.
START_STEP = 2

_ProcessGroup: Any = dist.ProcessGroup


class PowerSgd:
    """Low-rank factors of every matrix, with warm start and error feedback.

    The hook averages, which is undone here. Tensors that do not shrink to at least half (vectors,
    small matrices) are sent uncompressed, and so is everything in the first two steps.
    """

    name = "powersgd"

    def __init__(self, numbers: Numbers, seed: int, group: dist.ProcessGroup | None = None) -> None:
        """numbers: the rank of the factors."""
        self._rank = int(numbers["rank"])
        self._ranks = dist.get_world_size(group)
        self._group = _Blocking(group or dist.group.WORLD, self._ranks)
        self._state = power_sgd.PowerSGDState(
            process_group=self._group,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=START_STEP,
            random_seed=seed % 2**32,
            # Avoids a division by zero for a gradient of zeros.
            orthogonalization_epsilon=torch.finfo(torch.float32).tiny,
        )

    def sum(self, bucket: Bucket) -> float:
        before = self._group.sent_bytes
        power_sgd.powerSGD_hook(self._state, bucket).wait()
        if self._group.failure is not None:
            raise self._group.failure
        bucket.buffer().mul_(self._ranks)
        return self._group.sent_bytes - before

    def describe(self) -> CompressionResult:
        return {"rank": self._rank, "start_step": START_STEP, "error_feedback": True}


class _Blocking(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A group whose all-reduce has ended when it returns; counts the bytes sent.

    The hook waits for each collective in the callback of the previous one. With a transport whose
    single progress thread runs callbacks, that would be a deadlock; here the callbacks run in the
    thread that called the hook. An error is kept as `failure`, because the callbacks would only
    pass on its text.
    """

    def __init__(self, group: Any, ranks: int) -> None:
        super().__init__(dist.get_rank(group), ranks)
        self._inner = group
        self._rank = dist.get_rank(group)
        self._ranks = ranks
        self.sent_bytes = 0.0
        self.failure: Exception | None = None

    def allreduce(self, tensors: list[Tensor], opts: Any) -> PendingWork:
        if self.failure is None:
            try:
                self._inner.allreduce(tensors, opts).wait()
            except Exception as error:  # noqa: BLE001  (raised by the caller of the hook)
                self.failure = error
        self.sent_bytes += sum(all_reduce_bytes(t.nbytes, self._ranks) for t in tensors)
        ended = PendingWork("allreduce", self._rank, 0.0, tensors)
        ended.finish()
        return ended
