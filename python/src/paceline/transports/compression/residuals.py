"""Residuals: compression errors of a rank's gradients, to be sent with those of the next step.

Error feedback: Seide et al.: 1-Bit Stochastic Gradient Descent (Interspeech 2014). Convergence of
biased compression with error feedback: Stich, Cordonnier, Jaggi: Sparsified SGD with Memory
(NeurIPS 2018).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.transports.compression.base import Bucket


class Residuals:
    """One residual for every gradient element, initially zero.

    They belong to parameters, not to buckets, because DistributedDataParallel rebuilds its buckets
    after the first step.
    """

    def __init__(self) -> None:
        self._flat: dict[int, tuple[tuple[int, ...], Tensor]] = {}  # by bucket, with parameters
        self._parts: dict[int, Tensor] = {}  # by parameter: views of those

    def of(self, bucket: Bucket) -> Tensor:
        """Return the residuals of a bucket, shape (elements,), in its order; to be changed in
        place."""
        parameters = tuple(id(parameter) for parameter in bucket.parameters())
        known = self._flat.get(bucket.index())
        if known is not None and known[0] == parameters:
            return known[1]
        flat = torch.zeros_like(bucket.buffer())
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
            if parameter in self._parts:
                part.copy_(self._parts[parameter])
            self._parts[parameter] = part
        self._flat[bucket.index()] = parameters, flat
        return flat
