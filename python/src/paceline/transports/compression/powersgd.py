"""PyTorch's own PowerSGD hook, as a compressor.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization (NeurIPS 2019): a gradient matrix (n, m) travels as two factors (n, r) and (m, r).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from paceline.transports.compression.base import all_reduce_bytes, bytes_of
from paceline.transports.work import PendingWork

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.transports.compression.base import Bucket

# DistributedDataParallel deals its buckets out anew after the first step, and the hook keeps its
# state by bucket; it refuses to start earlier.
START_STEP = 2

_ProcessGroup: Any = dist.ProcessGroup


class PowerSgd:
    """Low-rank factors of every matrix, with a warm start and error feedback.

    The hook averages, which is undone here. What does not shrink at least to half (vectors, small
    matrices) is sent as it is, and so is everything in the first two steps.
    """

    name = "powersgd"

    def __init__(self, rank: int, seed: int, group: dist.ProcessGroup | None = None) -> None:
        """rank: of the factors."""
        self._ranks = dist.get_world_size(group)
        self._group = _Blocking(group or dist.group.WORLD, self._ranks)
        self._state = power_sgd.PowerSGDState(
            process_group=self._group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=START_STEP,
            random_seed=seed % 2**32,
            # A gradient of zeros would otherwise be divided by its length.
            orthogonalization_epsilon=torch.finfo(torch.float32).tiny,
        )
        self._rank = rank

    def sum(self, bucket: Bucket) -> float:
        before = self._group.sent_bytes
        power_sgd.powerSGD_hook(self._state, bucket).wait()
        if self._group.failure is not None:
            raise self._group.failure
        bucket.buffer().mul_(self._ranks)
        return self._group.sent_bytes - before

    def describe(self) -> dict[str, Any]:
        return {"rank": self._rank, "start_step": START_STEP, "error_feedback": True}


class _Blocking(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A group whose all-reduce has ended when it returns; counts what is sent.

    The hook waits for each collective in the callback of the one before it. With a transport that
    calls back from the one thread that carries out its collectives, that would wait for ever; here
    the callbacks run in the thread that called the hook. What goes wrong is kept as `failure`: out
    of the callbacks it would come as the text of a text of it.
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
            except Exception as error:  # noqa: BLE001  (raised by whoever called the hook)
                self.failure = error
        self.sent_bytes += sum(all_reduce_bytes(bytes_of(t), self._ranks) for t in tensors)
        ended = PendingWork("allreduce", self._rank, 0.0, tensors)
        ended.finish()
        return ended
