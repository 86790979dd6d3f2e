"""Names, weights, buffers, groups and used gradients of this rank, for its record of own steps."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.base.torch_internals.fsdp import FlatParameter
from paceline.measure.records.own_steps import Group, Sketch, State, TensorPart, UsedGradient
from paceline.train.rank.script.modules import (
    CalledModules,
    Known,
    flat_parameters,
    named_parameters,
    parameter_names,
    plain_names,
)
from paceline.train.rank.script.own_gradients import Leaf, coordinate, place_of, sketch
from paceline.train.rank.script.tensors import Checksums, gradient_of

# In training mode they normalise by their rows, and only update their buffers.
_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


_MARKED_ELEMENTS = 16


class States:
    """Reads the state of a rank's models and optimisers."""

    def __init__(self, modules: CalledModules, checksums: Checksums) -> None:
        self._modules = modules
        self._checksums = checksums  # of weights and gradients
        self._known: Known | None = None  # of called modules when names were last found
        self._models: dict[str, nn.Module] = {}
        self._flat: list[FlatParameter] = []
        self._buffers: dict[tuple[int, str], State] = {}
        self._of_module: dict[int, str] = {}
        self._constant: dict[int, str] = {}  # names of modules that are parts of no model
        self._last_call: dict[int, int] = {}  # by id of the module
        self._trained: set[int] = set()  # ids of modules that were called with gradients

    def models(self) -> dict[str, nn.Module]:
        """Return the called models by a prefix; the first one has none."""
        if self._modules.known != self._known:
            self._known = self._modules.known
            self._models = self._modules.parts() or self._by_kind()
            self._flat = flat_parameters(self._models)
            self._of_module = {
                id(module): (prefix + plain(name)).removesuffix(".")
                for prefix, model in self._models.items()
                for plain in [plain_names(model)]
                for name, module in model.named_modules()
            }
            self._constant = {
                id(module): f"{type(model).__name__}.{name}".removesuffix(".")
                for model in self._modules.outermost()
                for name, module in model.named_modules()
                if id(module) not in self._of_module
            }
        return self._models

    def _by_kind(self) -> dict[str, nn.Module]:
        kinds: Counter[str] = Counter()
        found: dict[str, nn.Module] = {}
        for model in self._modules.models().values():
            kind = type(model).__name__
            kinds[kind] += 1
            prefix = f"{kind}{kinds[kind] if kinds[kind] > 1 else ''}." if found else ""
            found[prefix] = model
        return found

    def flat(self) -> list[FlatParameter]:
        self.models()
        return self._flat

    def names(self, optimizers: Sequence[Optimizer]) -> dict[int, str]:
        """Return the names of parameters by their id."""
        by_id = parameter_names(self.models())
        names = {id(p): name for name, p in named_parameters(optimizers, by_id).items()}
        names |= {key: each[0] for key, each in by_id.items()}
        for each in self._flat:
            name = _flat_name(each)
            names |= dict.fromkeys((id(each.leaf), *map(id, each.parameters)), name)
        return names

    def names_of(self, modules: Iterable[nn.Module]) -> set[str]:
        """Return the names of modules that are parts of models; of a whole model its prefix."""
        whole = {id(model): prefix for prefix, model in self.models().items()}
        known = [each for each in modules if id(each) in self._of_module]
        return {whole.get(id(each), self._of_module[id(each)]) for each in known}

    # --- weights, buffers ---

    def weights(self, optimizers: Sequence[Optimizer]) -> list[State]:
        """Return all parameters of models and optimisers."""
        names = self.names(optimizers)
        of_models = (p for model in self.models().values() for p in model.parameters())
        of_optimizers = (p for o in optimizers for g in o.param_groups for p in g["params"])
        found: dict[str, State] = {}
        flat = {id(p): each for each in self._flat for p in (each.leaf, *each.parameters)}
        for parameter in (*of_optimizers, *of_models):
            name = names.get(id(parameter))
            if name is None or name in found:
                continue
            owner = flat.get(id(parameter))
            if owner is None:
                found[name] = State(
                    place=place_of(parameter, name) or _coordinates(parameter, name),
                    shape=list(parameter.shape),
                    value=sketch(local(parameter), self._checksums),
                )
            else:
                own = owner.own(Tensor.detach)
                place = TensorPart(name=name, part=owner.shard, parts=owner.shards)
                found[name] = State(place=place, shape=list(own.shape), value=sketch(own))
        return list(found.values())

    def mark(self) -> int:
        """Return a checksum of a few numbers of each weight, which costs little in a step."""
        found = 0
        for parameter in (p for model in self.models().values() for p in model.parameters()):
            if isinstance(parameter, DTensor) or parameter.is_meta:
                continue
            few = parameter.detach().flatten()[:_MARKED_ELEMENTS].to("cpu", torch.float32)
            found = zlib.crc32(few.numpy().tobytes(), found)
        return found

    def called(self, module: nn.Module, call: int) -> None:
        """Note the buffers of a module at its first call in a step.

        call: number of the outermost call around it. DDP broadcasts buffers when that begins, so
        modules that are called several times in it may differ until the next one. Evaluations of a
        module that is trained are left out: it was broadcast for none of them.
        """
        if torch.is_grad_enabled():
            self._trained.add(id(module))
        elif not module.training and id(module) in self._trained:
            return
        if self._last_call.get(id(module)) == call:
            return
        self._last_call[id(module)] = call
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(buffer, DTensor) or buffer.is_meta or (id(module), name) in self._buffers:
                continue
            self._buffers[id(module), name] = State(
                place=TensorPart(name=name),
                shape=list(buffer.shape),
                value=sketch(buffer),
                is_used=not (isinstance(module, _STATISTICS) and module.training),
            )

    def take_buffers(self) -> list[State]:
        self.models()
        found = []
        for (number, name), state in self._buffers.items():
            owner = self._of_module.get(number, self._constant.get(number))
            if owner is not None:
                full = ".".join(part for part in (owner, name) if part)
                is_of_model = number in self._of_module
                place = TensorPart(name=full)
                found.append(replace(state, place=place, is_of_model=is_of_model))
        self._buffers = {}
        return found

    def mixing(self) -> list[str]:
        """Return the modules that normalise over the rows of this rank."""
        return [
            f"{self._of_module[id(module)]} ({type(module).__name__})"
            for model in self.models().values()
            for module in model.modules()
            if type(module).__name__.startswith("BatchNorm")
            and module.training
            and id(module) in self._of_module
        ]

    # --- optimisers ---

    def moments(self, optimizer: Optimizer) -> list[State]:
        """Return the state of an optimiser, such as moments that it has restored."""
        if not getattr(type(optimizer).step, "__module__", "").startswith("torch.optim"):
            return []  # it may divide its state among ranks
        names = self.names([optimizer])
        flat = {id(p) for each in self._flat for p in each.parameters}
        found = []
        for parameter in _parameters(optimizer):
            name = names.get(id(parameter), "")
            place = place_of(parameter, name)
            if place is None or id(parameter) in flat:
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found.append(
                        State(
                            place=replace(place, name=f"{key} of {name}"),
                            shape=list(value.shape),
                            value=sketch(local(value)),
                        )
                    )
        return found

    def checksums(self, optimizer: Optimizer) -> dict[str, int]:
        """Return a checksum of each parameter of an optimiser."""
        names = self.names([optimizer])
        return {
            names.get(id(p), ""): self._checksums.of(local(p))
            for p in _parameters(optimizer)
            if not p.is_meta
        }

    def used(self, optimizer: Optimizer, clipped: Mapping[int, Sketch]) -> list[UsedGradient]:
        """Return the gradients of an optimiser's parameters."""
        names = self.names([optimizer])
        flat = {id(p): each for each in self._flat for p in each.parameters}
        found: dict[str, UsedGradient] = {}
        for parameter in _parameters(optimizer):
            name = names.get(id(parameter), "")
            owner = flat.get(id(parameter))
            if name in found:
                continue
            if owner is not None:
                if any(p.grad is not None for p in owner.parameters):
                    place = TensorPart(name=name, part=owner.shard, parts=owner.shards)
                    found[name] = UsedGradient(place=place, value=sketch(owner.own(gradient_of)))
            elif parameter.grad is not None:
                found[name] = UsedGradient(
                    place=place_of(parameter, name) or _coordinates(parameter, name),
                    value=sketch(local(parameter.grad), self._checksums),
                    before_clip=clipped.get(id(parameter)),
                )
        return list(found.values())

    def used_after(
        self, before: Iterable[UsedGradient], optimizer: Optimizer, clipped: Mapping[int, Sketch]
    ) -> list[UsedGradient]:
        """Return gradients before a step with those after it, where they differ."""
        known = {each.place: each for each in before}
        for each in self.used(optimizer, clipped):
            old = known.get(each.place)
            known[each.place] = UsedGradient(
                place=each.place,
                value=each.value if old is None else old.value,
                after=None if old is None or old.value == each.value else each.value,
                before_clip=each.before_clip,
            )
        return list(known.values())

    def groups(self, optimizer: Optimizer, names: Mapping[int, str]) -> list[Group]:
        return [
            Group(
                names=sorted({names.get(id(p), "") for p in group["params"]}),
                options=options_of(group),
            )
            for group in optimizer.param_groups
        ]


def options_of(group: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the options of a group of an optimiser, without its parameters."""
    return {
        key: text
        for key, value in group.items()
        if key != "params" and (text := _option(value)) is not None
    }


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def name_of(leaf: Leaf, names: Mapping[int, str]) -> str | None:
    return next((names[id(p)] for p in (*leaf.owners, leaf.tensor) if id(p) in names), None)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, dense."""
    own = tensor.detach()
    part = own.to_local() if isinstance(own, DTensor) else own
    return part.to_dense() if part.layout != torch.strided else part


def _coordinates(tensor: Tensor, name: str) -> TensorPart:
    """Return the part of a tensor that is sharded in several or in later dimensions."""
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    part, parts = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            part = part * mesh.size(dimension) + coordinate(mesh, dimension)
            parts *= mesh.size(dimension)
    return TensorPart(
        name=f"{name} ({' '.join(map(str, tensor.placements))})", part=part, parts=parts
    )


def _flat_name(flat: FlatParameter) -> str:
    first, last = flat.names[0], flat.names[-1]
    return first if first == last else f"{first} … {last}"


def _option(value: object) -> float | str | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, bool | int | float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, str | tuple):
        return str(value)
    return None
