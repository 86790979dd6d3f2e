"""One replica a rank: sequential, intraop and processes.

With peers the replica is wrapped in torch's DistributedDataParallel, whose buckets are reduced
while the backward pass still runs (Li et al.: PyTorch Distributed, VLDB 2020).

The loss of a rank is the sum over its samples divided by the number of samples of the *global*
batch, and gradients are summed over ranks: that is the gradient of the global mean, whatever the
sizes of the shares. (DDP's own mean over ranks would have to be undone, and costs one more pass
over all gradients.)
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline.train.models import set_sample_keys
from paceline.train.strategies import buckets
from paceline.train.strategies.base import GradientResult, TrainBatch

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.train.context import RankContext


class ReplicaStrategy:
    """One model; DistributedDataParallel around it if there are peers."""

    def __init__(self) -> None:
        self._buckets: buckets.Buckets | None = None
        self._parallel: nn.Module
        self._model: nn.Module
        self._trial: Trial

    def prepare(self, model: nn.Module, context: RankContext, trial: Trial) -> None:
        self._trial = trial
        self._model = self._parallel = model
        if context.world_size == 1:
            return
        self._buckets = buckets.Buckets()
        parallel = DistributedDataParallel(
            model,
            bucket_cap_mb=trial.bucket_mb,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
        parallel.register_comm_hook(self._buckets, buckets.sum_gradients)
        self._parallel = parallel

    def gradient(self, batch: TrainBatch) -> GradientResult:
        started_s = time.perf_counter()
        for parameter in self._model.parameters():
            parameter.grad = None
        loss = self._loss_sum(batch)
        loss_sum = float(loss.detach())
        forwarded_s = time.perf_counter()
        (loss / batch.global_samples).backward()  # type: ignore[no-untyped-call]
        ended_s = time.perf_counter()
        ready_s = ended_s if self._buckets is None else self._buckets.ready_s
        return GradientResult(
            loss_sum=loss_sum,
            forward_s=forwarded_s - started_s,
            backward_s=ready_s - forwarded_s,
            comm_s=None if self._buckets is None else ended_s - ready_s,
            comm_ready_unix_s=None if self._buckets is None else self._buckets.ready_unix_s,
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._model.state_dict())

    def describe(self) -> dict[str, Any]:
        if self._buckets is None:
            return {}
        return {"bucket_bytes": self._buckets.sizes_bytes, "bucket_mb_asked": self._trial.bucket_mb}

    def _loss_sum(self, batch: TrainBatch) -> Tensor:
        """Sum of the samples' losses. A rank without samples takes part with one of no weight."""
        images, labels, ids = batch.images, batch.labels, batch.sample_ids
        weight = 1.0
        if len(ids) == 0:
            images = images.new_zeros((1, *images.shape[1:]))
            labels = labels.new_zeros(1)
            ids, weight = np.zeros(1, dtype=np.int64), 0.0
        set_sample_keys(self._model, self._trial.training.seed, batch.epoch, ids)
        with self._autocast():
            loss = cross_entropy(self._parallel(images), labels, reduction="sum")
        return loss * weight if weight != 1.0 else loss

    def _autocast(self) -> AbstractContextManager[object]:
        if self._trial.training.precision == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return nullcontext()
