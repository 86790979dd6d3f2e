"""A rank's own gradients, before they are exchanged: hooks of the tensors that autograd knows.

A parameter is followed when a module gets it, so that this hook runs before all hooks of the
script. The whole parameters of FSDP 2 and the flat ones of FSDP 1 are found before backward passes.

They are kept as linear sketches: few numbers that add up as the tensors do. Element i belongs to
number i mod 64, with a random sign that is the same on all ranks and in all runs. A tensor of at
most 64 elements keeps all of them.
"""

from __future__ import annotations

import base64
import math
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.base.torch_internals import is_traced
from paceline.base.torch_internals.autograd import hooks_of
from paceline.base.torch_internals.fsdp import FlatParameter
from paceline.measure.records.own_steps import OwnGradient, OwnPass, Sketch, TensorPart
from paceline.train.rank.script.tensors import Checksums, flattened

_MOST_PASSES = 16


@dataclass(slots=True)
class Leaf:
    """A tensor of which autograd computes the gradient.

    owners: the parameters of optimisers that get it. parts, length: how they share it.
    """

    tensor: Tensor
    owners: list[Tensor]
    parts: int = 1
    length: int = 0
    frozen: list[tuple[int, int]] = field(default_factory=list)  # ranges without a gradient
    has_gradient: bool | None = None  # before the pass; None: ask the tensor
    passes: list[list[OwnPass]] = field(default_factory=list)  # of each part
    handles: list[Any] = field(default_factory=list)
    hooks: int = 0  # of the script
    is_sharded: bool = False  # its gradient is a DTensor


class OwnGradients:
    """Follows leaves until `stop`."""

    def __init__(self) -> None:
        self.leaves: dict[int, Leaf] = {}
        self.number = 0  # of the backward pass
        self._active = True

    def follow(self, tensor: Tensor) -> Leaf | None:
        if not (self._active and tensor.requires_grad and tensor.is_leaf):
            return None
        if is_traced() or type(tensor).__name__.startswith("Fake"):
            return None
        leaf = self.leaves.get(id(tensor))
        if leaf is None:
            leaf = self.leaves[id(tensor)] = Leaf(tensor, [tensor])
            _hook(leaf, self._arrived)
        return leaf

    def stop(self) -> None:
        self._active = False
        for leaf in self.leaves.values():
            for handle in leaf.handles:
                handle.remove()
        self.leaves = {}

    def before_pass(self, models: Iterable[nn.Module], flat: Iterable[FlatParameter]) -> None:
        """Prepare for a backward pass: find sharded parameters, and gradients that are there."""
        self.number += 1
        for owner, whole in _unsharded(models):
            leaf = self.follow(whole)
            if leaf is not None and isinstance(owner, DTensor):
                leaf.owners = [owner]
                leaf.parts, leaf.length = _parts(owner, whole)
                leaf.has_gradient = _any(owner.grad) or _any(whole.grad)
        for each in flat:
            leaf = self.follow(each.leaf)
            if leaf is not None:
                leaf.owners = list(each.parameters)
                leaf.parts, leaf.length = each.shards, each.shard_elements
                leaf.frozen = each.frozen
                leaf.has_gradient = any(_any(one.grad) for one in (each.leaf, *leaf.owners))
        for leaf in self.leaves.values():
            leaf.hooks = len(hooks_of(leaf.tensor)) - len(leaf.handles)
            if leaf.hooks and len(leaf.handles) == 1:
                _hook(leaf, self._passed)

    def _arrived(self, leaf: Leaf, gradient: Tensor) -> None:
        if not self._active or is_traced():
            return
        if isinstance(gradient, DTensor):
            leaf.is_sharded = True
            return
        has = leaf.has_gradient
        fresh = not (_any(leaf.tensor.grad) if has is None else has)
        leaf.has_gradient = None if has is None else True
        found = _sketches(leaf, gradient)
        if len(leaf.passes) != len(found):
            leaf.passes = [[] for _ in found]
        for passes, each in zip(leaf.passes, found, strict=True):
            if len(passes) >= _MOST_PASSES:
                del passes[0]
            passes.append(OwnPass(number=self.number, fresh=fresh, first=each))

    def _passed(self, leaf: Leaf, gradient: Tensor) -> None:
        """Note what hooks of the script made of a gradient."""
        if not self._active or not leaf.passes or isinstance(gradient, DTensor):
            return
        for passes, each in zip(leaf.passes, _sketches(leaf, gradient), strict=True):
            last = passes[-1]
            if last.last is None and each.crc32 != last.first.crc32:
                passes[-1] = OwnPass(
                    number=last.number, fresh=last.fresh, first=last.first, last=each
                )


def take(leaf: Leaf, name: str) -> list[OwnGradient]:
    """Return the gradients of a leaf since the last step, and forget them."""
    found = [
        OwnGradient(
            place=TensorPart(name=name, part=part, parts=leaf.parts),
            passes=passes,
            hooks=leaf.hooks,
        )
        for part, passes in enumerate(leaf.passes)
    ]
    leaf.passes = []
    return found


def _hook(leaf: Leaf, answer: Any) -> None:
    handle = leaf.tensor.register_hook(partial(answer, leaf))  # type: ignore[no-untyped-call]
    leaf.handles.append(handle)


def _sketches(leaf: Leaf, gradient: Tensor) -> list[Sketch]:
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    if leaf.frozen:
        dense = dense.detach().clone()
        for begin, end in leaf.frozen:
            dense[begin:end] = 0
    if leaf.parts == 1:
        return [sketch(dense)]
    return [sketch(each) for each in sections(dense, leaf.length, leaf.parts)]


def _unsharded(models: Iterable[nn.Module]) -> Iterable[tuple[Tensor, Tensor]]:
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from paceline.base.torch_internals.fsdp import (  # noqa: PLC0415  (takes a while)
        unsharded_parameters,
    )

    for model in models:
        yield from unsharded_parameters(model)


def place_of(tensor: Tensor, name: str = "") -> TensorPart | None:
    """Return which range of a tensor's first dimension a rank has; None if it has another part."""
    if not isinstance(tensor, DTensor):
        return TensorPart(name=name)
    sharded = [
        (dimension, each)
        for dimension, each in enumerate(tensor.placements)
        if not each.is_replicate()
    ]
    if not sharded:
        return TensorPart(name=name)
    dimension, placement = sharded[0]
    if len(sharded) > 1 or not placement.is_shard(0):
        return None
    mesh = tensor.device_mesh
    return TensorPart(name=name, part=coordinate(mesh, dimension), parts=mesh.size(dimension))


def coordinate(mesh: DeviceMesh, dimension: int) -> int:
    """Return the place of this rank in a mesh, also after its groups were destroyed."""
    own = mesh.get_coordinate()
    assert own is not None, "a rank outside of the mesh has no part"
    return own[dimension]


def _parts(owner: DTensor, whole: Tensor) -> tuple[int, int]:
    """Return how many ranges of a whole tensor ranks have, and the elements of one."""
    place = place_of(owner)
    if place is None or not owner.dim() or not owner.shape[0]:
        return 1, whole.numel()
    rows = -(-owner.shape[0] // place.parts)
    return place.parts, rows * (whole.numel() // owner.shape[0])


def _any(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if own.layout != torch.strided:
        own = own.coalesce().values()
    return bool(own.any())


_NUMBERS = 64
# Elements at once: they stay in a core's cache.
_BLOCK = 2**16
_LOW = {torch.bfloat16, torch.float16}


def sketch(tensor: Tensor, checksums: Checksums | None = None) -> Sketch:
    """Return the sketch of all elements of a tensor, in their order.

    checksums: those that are known, to which that of the tensor is added.
    """
    flat = flattened(tensor)
    known = None if checksums is None else checksums.known(tensor)
    total = torch.zeros(_NUMBERS, dtype=torch.float64)
    square = 0.0
    plain = 0.0
    checksum = 0
    for block, part in enumerate(torch.split(flat, _BLOCK)):
        square += float(torch.dot(part, part))
        plain += float(part.sum(dtype=torch.float64))
        if known is None:
            checksum = zlib.crc32(part.numpy().data, checksum)
        signed = part * _signs()[: len(part)]
        if len(part) % _NUMBERS:
            signed = torch.nn.functional.pad(signed, (0, -len(part) % _NUMBERS))
        total += signed.view(-1, _NUMBERS).sum(0).double() * _sign_of_block(block)
    if known is not None:
        checksum = known
    elif checksums is not None:
        checksums.note(tensor, checksum)
    return Sketch(
        numbers=base64.b64encode(total.float().numpy().astype("<f4").tobytes()).decode(),
        l2=square**0.5 if square < float("inf") else -1.0,
        crc32=checksum,
        low=tensor.dtype in _LOW,
        total=plain if math.isfinite(plain) else None,
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
