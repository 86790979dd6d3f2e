"""Linear sketches of tensors: few numbers that add up as the tensors do.

Element i belongs to number i mod 64, with a random sign that is the same on all ranks and in all
runs. A tensor of at most 64 elements keeps all of them.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import torch
from torch import Tensor

from paceline.measure.records.own_steps import Sketch

_NUMBERS = 64
# Elements at once: they stay in a core's cache.
_BLOCK = 2**16
_LOW = {torch.bfloat16, torch.float16}


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of all elements of a tensor, in their order."""
    kind = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    flat = tensor.detach().to("cpu", kind).contiguous().reshape(-1)
    total = torch.zeros(_NUMBERS, dtype=torch.float64)
    square = 0.0
    for block, part in enumerate(torch.split(flat, _BLOCK)):
        square += float(torch.dot(part, part))
        signed = part * _signs()[: len(part)]
        if len(part) % _NUMBERS:
            signed = torch.nn.functional.pad(signed, (0, -len(part) % _NUMBERS))
        total += signed.view(-1, _NUMBERS).sum(0).double() * _sign_of_block(block)
    return Sketch(
        numbers=base64.b64encode(total.float().numpy().astype("<f4").tobytes()).decode(),
        l2=square**0.5 if square < float("inf") else -1.0,
        crc32=zlib.crc32(flat.numpy().tobytes()),
        low=tensor.dtype in _LOW,
    )


def sections(tensor: Tensor, length: int, parts: int) -> list[Tensor]:
    """Return `parts` ranges of `length` elements of a flattened tensor; the last may be shorter."""
    flat = tensor.detach().reshape(-1)
    return [flat[part * length : (part + 1) * length] for part in range(parts)]


@cache
def _signs() -> Tensor:
    generator = torch.Generator().manual_seed(_NUMBERS)
    return torch.randint(0, 2, (_BLOCK,), generator=generator).float() * 2 - 1


@cache
def _block_signs() -> list[int]:
    generator = torch.Generator().manual_seed(0)
    signs: list[int] = (torch.randint(0, 2, (8192,), generator=generator) * 2 - 1).tolist()
    return signs


def _sign_of_block(block: int) -> int:
    table = _block_signs()
    return table[block % len(table)]
