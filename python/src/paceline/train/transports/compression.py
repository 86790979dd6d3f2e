"""Gradient compression: how the gradients of one bucket are summed over ranks.

Codecs write gradients as 16-bit and 8-bit numbers, which are sent encoded and summed decoded:

    every rank encodes its n parts of the bucket and sends part k to rank k     (all-to-all)
    rank k decodes what it received and sums it in float32, in the order of the ranks
    rank k encodes the sum and sends it to all ranks                            (all-gather)
    every rank decodes the n sums

Each rank sends 2 (n - 1) / n times the encoded bucket, like a bandwidth-optimal all-reduce of it.
But the sum keeps the precision of float32, and no transport needs to add encoded numbers (Open MPI
sums 16-bit types as 32-bit ones, and sends those). All ranks decode the same bytes, so results are
bit-identical.

Between two ranks the volume is the same if each receives the other's whole bucket (all-gather) and
sums both itself in the order of the ranks. That needs one message less, and the sum is not encoded
again. So two ranks use this variant.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.functional import pad

from paceline.collectives.work import EndedWork
from paceline.measure.records.communication import CompressionResult
from paceline.plan.costs import all_gather_bytes, all_reduce_bytes, exchange_bytes
from paceline.train.transports.bucket_sums import (
    Bucket,
    Numbers,
    Residuals,
    all_gather,
    all_to_all,
)

BLOCK = 256  # elements that share a scale, which takes 4 bytes
_LEVELS = 127.0
_SCALE_BYTES = 4


class Half:
    """Rounding to bfloat16 (8 bits of mantissa, range of float32) or float16 (11 bits).

    float16 clamps larger values to its maximum, 65504, so that no infinity reaches the weights;
    values below 3e-8 become 0. NaN stays NaN.
    """

    def __init__(self, name: Literal["bf16", "fp16"]) -> None:
        self.name: str = name
        self.block = 1
        self.feeds_back = False
        self._type = torch.bfloat16 if name == "bf16" else torch.float16

    def encode(self, parts: Tensor) -> Tensor:
        if self._type == torch.float16:
            largest = torch.finfo(self._type).max
            parts = parts.clamp(-largest, largest)
        return parts.to(self._type).view(torch.uint8)

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.view(self._type).to(torch.float32)

    def describe(self) -> CompressionResult:
        return {}


class Blockwise:
    """Integers from -127 to 127 times a scale per block: the largest magnitude over 127, rounded to
    nearest.

    Seide et al. and Dettmers (8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016)
    quantise gradients so. Blocks keep one large value from reducing the precision of all others.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self.name = "int8"
        self.block = block
        self.feeds_back = True

    def encode(self, parts: Tensor) -> Tensor:
        """Return for each part the scales of its blocks, then their integers."""
        blocks = parts.view(len(parts), -1, self.block)
        scales = blocks.abs().amax(dim=2, keepdim=True).div_(_LEVELS)
        smallest = torch.finfo(torch.float32).tiny
        numbers = blocks.div(scales.clamp_min(smallest)).round_().to(torch.int8)
        return torch.cat(
            [
                scales.view(len(parts), -1).view(torch.uint8),
                numbers.view(len(parts), -1).view(torch.uint8),
            ],
            dim=1,
        )

    def decode(self, encoded: Tensor) -> Tensor:
        blocks = encoded.shape[1] // (self.block + _SCALE_BYTES)
        scales, numbers = torch.split(encoded, [_SCALE_BYTES * blocks, self.block * blocks], dim=1)
        shaped = numbers.view(torch.int8).view(len(encoded), blocks, self.block)
        factors = scales.contiguous().view(torch.float32).view(len(encoded), blocks, 1)
        decoded: Tensor = shaped * factors
        return decoded.view(len(encoded), -1)

    def describe(self) -> CompressionResult:
        return {"block": self.block}


# Encodes float32 numbers as fewer bytes; encoding twice gives the same bytes. `encode` takes parts
# of shape (m, elements), each by itself, and returns uint8 of shape (m, bytes); `decode` returns a
# new tensor of shape (m, elements). block: the number of elements of a part is a multiple of this.
# feeds_back: whether the error is added to the next step (error feedback).
Codec = Half | Blockwise


class CodecCompressor:
    """A compressor that uses a codec."""

    def __init__(self, codec: Codec, group: dist.ProcessGroup | None = None) -> None:
        self.name = codec.name
        self._codec = codec
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._in_parts = self._ranks > 2
        self._residuals = Residuals() if codec.feeds_back else None

    def sum(self, bucket: Bucket) -> float:
        flat = bucket.buffer()
        residual = None if self._residuals is None else self._residuals.of(bucket)
        if residual is not None:
            flat.add_(residual)
        return (self._sum_parts if self._in_parts else self._sum_all)(flat, residual)

    def _sum_all(self, flat: Tensor, residual: Tensor | None) -> float:
        encoded = self._codec.encode(self._parts(flat, 1))
        if residual is not None:
            torch.sub(flat, self._codec.decode(encoded).view(-1)[: flat.numel()], out=residual)
        gathered = all_gather(encoded.view(-1), self._group)
        first, *others = self._codec.decode(gathered)
        for other in others:
            first += other
        flat.copy_(first[: flat.numel()])
        return all_gather_bytes(encoded.nbytes, self._ranks)

    def _sum_parts(self, flat: Tensor, residual: Tensor | None) -> float:
        encoded = self._codec.encode(self._parts(flat, self._ranks))
        received = all_to_all(encoded, self._group)
        total = self._codec.decode(received).sum(dim=0, keepdim=True)
        own = self._codec.encode(total)
        if residual is not None:
            self._keep(residual, flat, encoded, total - self._codec.decode(own))
        gathered = all_gather(own.view(-1), self._group)
        flat.copy_(self._codec.decode(gathered).view(-1)[: flat.numel()])
        sent = exchange_bytes(encoded.nbytes, self._ranks)
        return sent + all_gather_bytes(own.nbytes, self._ranks)

    def describe(self) -> CompressionResult:
        return {**self._codec.describe(), "error_feedback": self._codec.feeds_back}

    def _parts(self, flat: Tensor, parts: int) -> Tensor:
        """Split into parts of equal size, shape (parts, elements), padded with zeros."""
        each = -(-flat.numel() // parts)
        each += -each % self._codec.block
        missing = each * parts - flat.numel()
        return (pad(flat, (0, missing)) if missing else flat).view(parts, each)

    def _keep(self, residual: Tensor, flat: Tensor, encoded: Tensor, lost: Tensor) -> None:
        """Keep the errors of this rank's gradients, and of the sum that it encoded for all ranks.

        The second error is kept by the rank that made it: sent with its next gradients, it is added
        to the same sum (as in DoubleSqueeze, Tang et al., ICML 2019).
        """
        torch.sub(flat, self._codec.decode(encoded).view(-1)[: flat.numel()], out=residual)
        each = lost.numel()
        place = residual[self._rank * each : (self._rank + 1) * each]
        place.add_(lost.view(-1)[: place.numel()])


# The descriptors name these; the arguments are those of every compressor.


def bf16(_numbers: Numbers, _seed: int, group: dist.ProcessGroup | None) -> CodecCompressor:
    """Return a compressor to bfloat16."""
    return CodecCompressor(Half("bf16"), group)


def fp16(_numbers: Numbers, _seed: int, group: dist.ProcessGroup | None) -> CodecCompressor:
    """Return a compressor to float16."""
    return CodecCompressor(Half("fp16"), group)


def int8(_numbers: Numbers, _seed: int, group: dist.ProcessGroup | None) -> CodecCompressor:
    """Return a compressor to blocks of 8-bit integers."""
    return CodecCompressor(Blockwise(), group)


# --- the largest elements of a bucket's gradients; the others are sent later ---------------------
#
# Aji and Heafield: Sparse Communication for Distributed Gradient Descent (EMNLP 2017); Stich,
# Cordonnier, Jaggi: Sparsified SGD with Memory (NeurIPS 2018). Of Lin et al.: Deep Gradient
# Compression (ICLR 2018) it has the sampled threshold but not the momentum correction: the
# optimiser steps with the summed gradient, and its momentum refers to that.

_SAMPLE_STRIDE = 101  # prime: no row length of a layer is a multiple of it
_LEAST_SAMPLED = 100 * _SAMPLE_STRIDE  # fewer elements are ranked without a sample
_ROOM = 1.5  # candidates, estimated from the sample, as a multiple of the requested number


class TopK:
    """The share `density` of every bucket with the largest magnitudes, at least one element.

    Each rank sends values and indices (float32 and int32: 8 bytes per element) to all ranks;
    elements that it does not send stay in its residual. All ranks sum the same values in the order
    of ranks.
    """

    name = "topk"

    def __init__(
        self, numbers: Numbers, _seed: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self._density = numbers["density"]
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._residuals = Residuals()

    def sum(self, bucket: Bucket) -> float:
        flat, residual = bucket.buffer(), self._residuals.of(bucket)
        residual.add_(flat)
        count = max(1, round(self._density * flat.numel()))
        places = largest(residual.abs(), count)
        values = residual[places]
        residual[places] = 0.0
        own = torch.cat([values, places.to(torch.int32).view(torch.float32)])
        gathered = all_gather(own.view(torch.uint8), self._group)
        flat.zero_()
        for sent in gathered.view(torch.float32):
            theirs, at = sent.split(count)
            flat.index_add_(0, at.view(torch.int32), theirs)
        return all_gather_bytes(own.nbytes, self._ranks)

    def describe(self) -> CompressionResult:
        return {"density": self._density, "error_feedback": True}


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest, shape (count,), int64; of equal ones the first.

    A sample estimates the smallest of them, and only elements not below the estimate are ranked:
    exact, and a tenth of the time of ranking all of 6.5 million elements.
    """
    if magnitudes.numel() >= _LEAST_SAMPLED:
        sample = magnitudes[::_SAMPLE_STRIDE]
        wanted = min(len(sample), int(_ROOM * count / _SAMPLE_STRIDE) + 1)
        bound = torch.topk(sample, wanted, sorted=False).values.min()
        candidates = (magnitudes >= bound).nonzero().view(-1)
        if len(candidates) >= count:
            return candidates[_largest(magnitudes[candidates], count)]
    return _largest(magnitudes, count)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    bound = torch.topk(magnitudes, count, sorted=False).values.min()
    above = (magnitudes > bound).nonzero().view(-1)
    ties = (magnitudes == bound).nonzero().view(-1)[: count - len(above)]
    if len(above) + len(ties) < count:  # NaN elements, which compare false with everything
        return torch.topk(magnitudes, count).indices
    return torch.cat([above, ties])


# --- gradients as -1, 0 and 1 times a scale, with the correct expectation ------------------------
#
# Wen et al.: TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning
# (NeurIPS 2017). An element g of a layer whose largest magnitude is s becomes s * sign(g) with
# probability |g| / s, else 0, so its expectation is g. There are no residuals.
#
# In the paper all workers share one scale, so that a parameter server can send their sum in few
# bits. Here every rank receives all ranks' ternary gradients, which needs no common scale. A rank's
# own scale is never larger, so there is less noise.

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


# --- PyTorch's PowerSGD hook as a compressor -----------------------------------------------------
#
# Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
# Optimization (NeurIPS 2019): a gradient matrix (n, m) is sent as two factors (n, r) and (m, r).

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

    def allreduce(self, tensors: list[Tensor], opts: Any) -> EndedWork:
        if self.failure is None:
            try:
                self._inner.allreduce(tensors, opts).wait()
            except Exception as error:  # noqa: BLE001  (raised by the caller of the hook)
                self.failure = error
        self.sent_bytes += sum(all_reduce_bytes(t.nbytes, self._ranks) for t in tensors)
        return EndedWork(tensors)
