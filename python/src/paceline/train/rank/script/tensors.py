"""Tensors of a script's training that are compared with the baseline's.

Parameters have the names of their modules. Sharded parameters (DTensor, flat parameters of FSDP 1)
are gathered, collectively, and so are those of the stages of a pipeline; other parameters that
differ between ranks cannot be compared.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.base.torch_internals.fsdp import FlatParameter
from paceline.measure.records.layout import TrialFiles
from paceline.train.rank.script.modules import named_parameters
from paceline.train.training.tensors import save_tensors, sha256_by_name, sha256_of, update_l2

Final = tuple[dict[str, str], dict[str, float]]


class ParameterRecord:
    """The parameters of an optimiser, from the first step to the end of the script.

    names: of each parameter, by its id. flat: all flat parameters. files: where the first
    rank keeps tensors; None keeps only checksums.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[int, list[str]],
        files: TrialFiles | None,
        flat: Sequence[FlatParameter] = (),
    ) -> None:
        self._files = files
        self._parameters = named_parameters([optimizer], names)
        self._flat = flat
        self._is_staged = _has_stages()
        self._is_sharded = bool(
            self._is_staged
            or flat
            or any(isinstance(p, DTensor) for p in self._parameters.values())
        )
        self.not_compared = self._without_gradient(names)
        self._final: Final | None = None
        weights = self._weights()
        self.count = sum(p.numel() for p in weights.values())
        self.initial_sha256 = sha256_of(dict(sorted(weights.items())))
        if files is not None:
            save_tensors(files.initial_weights, weights)
            save_tensors(files.gradient, self._gradients())
        elif self._is_sharded:
            self._gradients()  # to gather them is collective

    def _without_gradient(self, names: dict[int, list[str]]) -> str | None:
        """Return why first gradients cannot be compared: without any, zeros would be equal."""
        if any(each.grad is not None for each in self._parameters.values()):
            return None
        if names and not any(id(each) in names for each in self._parameters.values()):
            return (
                "the optimiser has other parameters than the model, so it trains nothing; make it "
                "after the model is wrapped (FSDP, fully_shard)"
            )
        return "no parameter had a gradient when the first step of the optimiser began"

    def keep_sharded(self) -> None:
        """Take the final weights now if they are sharded, while ranks can still gather them."""
        if self._is_sharded:
            self._final = self._take_final()

    def final(self) -> Final:
        """Return the checksum of each final tensor, and the L2 norm by which it has changed.

        The norms are empty without files. Collective for sharded parameters.
        """
        return self._final or self._take_final()

    def _take_final(self) -> Final:
        weights = self._weights()
        moved: dict[str, float] = {}
        if self._files is not None:
            save_tensors(self._files.weights, weights)
            moved = update_l2(weights, load_file(self._files.initial_weights))
            self._files.initial_weights.unlink()
        return sha256_by_name(weights), moved

    def _weights(self) -> dict[str, Tensor]:
        return self._of_all_stages(whole_of(self._parameters, self._flat, Tensor.detach))

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients; zeros for parameters that the loss does not depend on."""
        return self._of_all_stages(whole_of(self._parameters, self._flat, gradient_of))

    def _of_all_stages(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        return gathered(tensors, device) if self._is_staged else tensors


def flattened(tensor: Tensor) -> Tensor:
    """Return the values of a tensor on the CPU, as float64 if it has that type, else as float32."""
    kind = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return tensor.detach().to("cpu", kind).contiguous().reshape(-1)


class Checksums:
    """Checksums (CRC-32) of the `flattened` values of tensors, each computed once.

    Two recorders look at the same weights and gradients when a step begins, and when it ends. The
    first one forgets what was known before it looks.
    """

    def __init__(self) -> None:
        # With the tensor, so that no other one gets its memory.
        self._known: dict[tuple[object, ...], tuple[Tensor, int]] = {}

    def of(self, tensor: Tensor) -> int:
        key = _memory_of(tensor)
        if key not in self._known:
            self.note(tensor, zlib.crc32(flattened(tensor).numpy().data))
        return self._known[key][1]

    def known(self, tensor: Tensor) -> int | None:
        found = self._known.get(_memory_of(tensor))
        return None if found is None else found[1]

    def note(self, tensor: Tensor, checksum: int) -> None:
        self._known[_memory_of(tensor)] = tensor.detach(), checksum

    def forget(self, *_step: object) -> None:
        """Forget all; may be a hook of a step."""
        self._known = {}


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _has_stages() -> bool:
    """Return whether ranks may have stages of a pipeline; only then the module is loaded."""
    loaded = "torch.distributed.pipelining.stage" in sys.modules
    return loaded and dist.is_initialized() and dist.get_world_size() > 1


def gathered(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name; each has that of the first rank that has it.

    Tensors are float32 on the CPU. device: of the tensors of the group. Collective.
    """
    shapes: list[dict[str, torch.Size]] = [{}] * dist.get_world_size()
    dist.all_gather_object(shapes, {name: each.shape for name, each in tensors.items()})
    found: dict[str, Tensor] = {}
    for rank, those in enumerate(shapes):
        for name, shape in those.items():
            if name not in found:
                own = tensors[name] if rank == dist.get_rank() else torch.empty(shape)
                sent = own.to(device).contiguous()
                dist.broadcast(sent, rank)
                found[name] = sent.cpu()
    return found


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter; zeros where it has none."""
    found = parameter.grad
    return torch.zeros_like(parameter).detach() if found is None else found.detach()


def whole_of(
    parameters: Mapping[str, Tensor],
    flat: Sequence[FlatParameter],
    of: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return something of each parameter as `whole` does, those of flat ones by their own names."""
    owners = {id(parameter): each for each in flat for parameter in each.parameters}
    found: dict[str, Tensor] = {}
    gathered_flat: set[int] = set()
    for name, parameter in parameters.items():
        owner = owners.get(id(parameter))
        if owner is None:
            found[name] = whole(of(parameter))
        elif id(owner) not in gathered_flat:
            gathered_flat.add(id(owner))
            found.update({each: whole(part) for each, part in owner.whole(of).items()})
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as float32 on the CPU, gathered if it is sharded."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if found.layout != torch.strided:
        found = found.to_dense()
    return found.to("cpu", torch.float32)


# Layers whose weights are one tensor, as gate and input of a block, or query, key and value.
_MOST_FUSED = 3


@dataclass(frozen=True, slots=True)
class DividedPart:
    """Which range of a tensor's places in a dimension a rank has.

    layers: that the tensor has one after the other; the rank has this range of each. size: of one
    layer in all.
    """

    dimension: int
    start: int
    length: int
    size: int
    layers: int = 1

    @property
    def place(self) -> int:
        """Return which one of all parts it is, if they are of one size."""
        return self.start // self.length

    def of(self, tensor: Tensor) -> Tensor:
        every = tensor.chunk(self.layers, self.dimension)
        own = [each.narrow(self.dimension, self.start, self.length) for each in every]
        return own[0] if self.layers == 1 else torch.cat(own, self.dimension)


def parts_of(
    tensors: Mapping[str, Tensor], wholes: Mapping[str, Tensor], ranks: int
) -> dict[str, DividedPart]:
    """Return which part of a whole tensor each tensor is, by its values.

    ranks: no tensor has more parts. A tensor that is equal to several parts has the place of the
    others; without one it is left out.
    """
    found = {
        name: each
        for name, tensor in tensors.items()
        if name in wholes and (each := _equal_parts(tensor, wholes[name], ranks))
    }
    places = {each[0].place for each in found.values() if len(each) == 1}
    return {
        name: part
        for name, each in found.items()
        for part in each
        if len(each) == 1 or places == {part.place}
    }


def _equal_parts(tensor: Tensor, whole: Tensor, ranks: int) -> list[DividedPart]:
    if tensor.dim() != whole.dim() or not tensor.numel():
        return []
    sizes = zip(tensor.shape, whole.shape, strict=True)
    divided = [(d, own, of_all) for d, (own, of_all) in enumerate(sizes) if own != of_all]
    if len(divided) != 1:
        return []
    [(dimension, own, of_all)] = divided
    if not own < of_all <= ranks * own + ranks:  # parts may differ by one
        return []
    values = tensor.detach().to(whole)
    for layers in range(1, _MOST_FUSED + 1):
        if own % layers or of_all % layers:
            continue
        length, last = own // layers, (of_all - own) // layers  # the last part may be smaller
        starts = sorted({*range(0, last + 1, length), last})
        size = of_all // layers
        choices = [DividedPart(dimension, start, length, size, layers) for start in starts]
        if equal := [each for each in choices if torch.equal(each.of(whole), values)]:
            return equal
    return []
