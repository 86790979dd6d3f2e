"""Gradients as -1, 0 and 1 times a scale, with the correct expectation.

Wen et al.: TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning
(NeurIPS 2017). An element g of a layer whose largest magnitude is s becomes s * sign(g) with
probability |g| / s, else 0, so its expectation is g. There are no residuals.

In the paper all workers share one scale, so that a parameter server can send their sum in few bits.
Here every rank receives all ranks' ternary gradients, which needs no common scale. A rank's own
scale is never larger, so there is less noise.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from paceline.measure.records.communication import CompressionResult
from paceline.plan.costs.link_cost import all_gather_bytes
from paceline.train.transports.compression.bucket import Bucket, Numbers, all_gather

CLIP = 2.5  # standard deviations, the paper's constant
_PER_BYTE = 4
_SHIFTS = (0, 2, 4, 6)
_SIGNS = (0.0, 1.0, -1.0, 0.0)  # by code; the last does not occur
_DECODED = [[_SIGNS[byte >> shift & 3] for shift in _SHIFTS] for byte in range(256)]


class TernGrad:
    """2 bits per element and 4 bytes per layer, from every rank to all ranks.

    seed: random draws differ for each step, rank and bucket, but repeat in a repeated run. clip:
    magnitudes of a layer are clipped at this many standard deviations, which adds a small bias and
    reduces the noise much (section 3.4 of the paper); None means no clipping.
    """

    name = "terngrad"

    def __init__(
        self,
        _numbers: Numbers,
        seed: int,
        group: dist.ProcessGroup | None = None,
        clip: float | None = CLIP,
    ) -> None:
        self._seed = seed
        self._clip = clip
        self._group = group
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size(group)
        self._step = 0

    def sum(self, bucket: Bucket) -> float:
        flat, gradients = bucket.buffer(), bucket.gradients()
        scales, codes = self._ternary(bucket)
        own = torch.cat([scales.view(torch.uint8), pack(codes)])
        gathered = all_gather(own, self._group)
        head = scales.nbytes
        sizes = [g.numel() for g in gradients]
        flat.zero_()
        for sent in gathered:
            theirs = sent[:head].clone().view(torch.float32).tolist()
            signs = unpack(sent[head:])[: flat.numel()]
            parts = zip(torch.split(flat, sizes), torch.split(signs, sizes), theirs, strict=True)
            for total, part, scale in parts:
                total.add_(part, alpha=scale)
        if bucket.is_last():
            self._step += 1
        return all_gather_bytes(own.nbytes, self._ranks)

    def describe(self) -> CompressionResult:
        return {"clip_standard_deviations": self._clip, "error_feedback": False}

    def _ternary(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return a scale per gradient and a code per element: 0, 1 for 1 and 2 for -1, uint8."""
        flat = bucket.buffer()
        # Drawn on the CPU, so that a GPU's run has the same numbers.
        draws = torch.rand(flat.numel(), generator=self._generator(bucket.index())).to(flat.device)
        sizes = [g.numel() for g in bucket.gradients()]
        scales = torch.empty(len(sizes), device=flat.device)
        for number, (part, draw) in enumerate(
            zip(torch.split(flat, sizes), torch.split(draws, sizes), strict=True)
        ):
            magnitudes = part.abs()
            if self._clip is not None and part.numel() > 1:
                magnitudes.clamp_(max=self._clip * part.std(correction=0))
            scales[number] = magnitudes.max()
            # |g| / s > draw, without a division by zero
            draw.mul_(scales[number]).sub_(magnitudes)
        chosen = draws < 0
        return scales, (flat < 0).to(torch.uint8).add_(1).mul_(chosen)

    def _generator(self, bucket: int) -> torch.Generator:
        words = np.random.SeedSequence([self._seed, self._step, self._rank, bucket])
        state = int(words.generate_state(1, np.uint64)[0])
        return torch.Generator().manual_seed(state >> 1)  # torch takes 63 bits


def pack(codes: Tensor) -> Tensor:
    """Pack codes below 4, uint8, four to a byte, padded with zeros."""
    fours = pad(codes, (0, -codes.numel() % _PER_BYTE)).view(-1, _PER_BYTE)
    packed = fours[:, 0].clone()
    for column, shift in enumerate(_SHIFTS[1:], start=1):
        packed |= fours[:, column] << shift
    return packed


def unpack(packed: Tensor) -> Tensor:
    """Return the signs of packed codes, float32, including the padding."""
    table = torch.tensor(_DECODED, device=packed.device)
    return table.index_select(0, packed.to(torch.int32)).view(-1)
