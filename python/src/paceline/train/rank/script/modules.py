"""Names of the parameters of a script: those of the modules that it calls.

An optimiser knows parameters, but not their names. The outermost modules that the script calls are
its models. Wrappers of torch (DistributedDataParallel, FSDP, `torch.compile`, checkpoints) add
words to names, which are removed, so that a parameter has one name in every layout. Where the
script calls the parts of a model one by one, as the stages of a pipeline by hand, names are those
within the model, although it is not called itself.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from paceline.base.torch_internals import children_of
from paceline.base.torch_internals.fsdp import FlatParameter
from paceline.base.torch_internals.fsdp import flat_parameters as of_model
from paceline.train.rank.script.phases import replaced

Known = tuple[int, bool]

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class CalledModules:
    """The modules that were called, in the order of their first call.

    is_stage: this rank sends to single other ones, and may call a single part of a model.
    """

    def __init__(self) -> None:
        self.is_stage = False
        self._called: dict[int, nn.Module] = {}
        self._paths: tuple[Known, dict[int, str]] = ((0, False), {})

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note calls while the context is active; `stop` ends it before."""
        self._handle = register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        self._handle.remove()

    def _note(self, module: nn.Module, _inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._called.setdefault(id(module), module)

    @property
    def known(self) -> Known:
        """Return what changes when names may."""
        return len(self._called), self.is_stage

    def models(self) -> dict[str, nn.Module]:
        """Return the outermost modules that have parameters, without wrappers, by a prefix.

        The prefix is the place in the model of which all of them are parts. Otherwise it is empty
        if there is one, else its class, with a number where it repeats.
        """
        if parts := self.parts():
            return parts
        outermost = [each for each in self.outermost() if _has_parameters(each)]
        if len(outermost) == 1:
            return {"": outermost[0]}
        counts: Counter[str] = Counter()
        models = {}
        for module in outermost:
            kind = type(module).__name__
            counts[kind] += 1
            models[f"{kind}{counts[kind] if counts[kind] > 1 else ''}."] = module
        return models

    def outermost(self) -> list[nn.Module]:
        """Return the modules that are no parts of other called ones, without wrappers."""
        inner = {
            id(each)
            for module in self._called.values()
            for each in module.modules()
            if each is not module
        }
        return [_unwrapped(module) for key, module in self._called.items() if key not in inner]

    def parts(self) -> dict[str, nn.Module]:
        """Return the outermost modules by their places in one that has all of them.

        Empty if there is none.
        """
        own = [each for each in self.outermost() if _has_parameters(each)]
        if self._paths[0] != self.known:
            self._paths = self.known, _paths(own, is_stage=self.is_stage)
        paths = self._paths[1]
        if not (own and all(id(each) in paths for each in own)):
            return {}
        return {f"{paths[id(each)]}.": each for each in own}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _paths(parts: Sequence[nn.Module], *, is_stage: bool) -> dict[int, str]:
    """Return the names of modules in the largest module that has all of them, by their id.

    A single module is a part only of a stage, or where another one was taken out: it may be in a
    container on one rank alone, such as one with averages of its weights.
    """
    own = {id(each) for each in parts}
    if not own:
        return {}
    best: tuple[tuple[int, str], dict[int, str]] | None = None
    for each in gc.get_objects():
        if not issubclass(type(each), nn.Module) or id(each) in own or not _is_container(each):
            continue
        places = {id(module): name for name, module in each.named_modules()}
        is_part = len(own) > 1 or _lacks_parts(each) or (is_stage and _has_more(each, parts))
        if not (own <= places.keys() and is_part):
            continue
        order = len(places), type(each).__name__
        if best is None or order > best[0]:
            plain = plain_names(each)
            best = order, {key: plain(places[key]) for key in own}
    return {} if best is None else best[1]


def _is_container(module: nn.Module) -> bool:
    """Return whether it is a module of the user, or a list of modules: no wrapper, no graph."""
    package = type(module).__module__
    return package.startswith("torch.nn.modules.container") or not package.startswith("torch.")


def _has_more(module: nn.Module, parts: Sequence[nn.Module]) -> bool:
    """Return whether a module has other parameters than these parts of it."""
    own = {id(parameter) for part in parts for parameter in part.parameters()}
    return any(id(parameter) not in own for parameter in module.parameters())


def _lacks_parts(module: nn.Module) -> bool:
    return None in children_of(module).values()


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(module, DistributedDataParallel | DataParallel):
        module = module.module
    return module


def without_wrappers(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that gives a part of the model its name without all wrappers.

    DistributedDataParallel may wrap a part of the model, whose names then have `.module`.
    """
    wrapped = [
        f"{name}.module"
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel | DataParallel)
    ]

    def plain(name: str) -> str:
        for each in reversed(wrapped):  # inner ones first
            if name == each or name.startswith(f"{each}."):
                name = each.removesuffix(".module") + name[len(each) :]
        return without_wrappers(name)

    return plain


def parameter_names(models: dict[str, nn.Module]) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for prefix, model in models.items():
        plain = plain_names(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(prefix + plain(name))
    return names


def named_parameters(
    optimizers: Sequence[Optimizer], names: dict[int, list[str]]
) -> dict[str, Tensor]:
    """Return the parameters of the optimisers by name.

    One that belongs to no called module is numbered: the same script lists it in the same place.
    """
    return {
        names.get(id(parameter), [_numbered(optimizer, group, place)])[0]: parameter
        for optimizer, each in enumerate(optimizers)
        for group, values in enumerate(each.param_groups)
        for place, parameter in enumerate(values["params"])
    }


def _numbered(optimizer: int, group: int, place: int) -> str:
    first = f"optimizer{optimizer}." if optimizer else ""
    return f"{first}group{group}.parameter{place}"


def flat_parameters(models: dict[str, nn.Module]) -> list[FlatParameter]:
    """Return the flat parameters of FSDP 1, with the names of the original parameters."""
    return [
        replace(flat, names=[prefix + plain(name) for name in flat.names])
        for prefix, model in models.items()
        for plain in [plain_names(model)]
        for flat in of_model(model)
    ]


def named_buffers(models: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {
        prefix + plain(name): buffer
        for prefix, model in models.items()
        for plain in [plain_names(model)]
        for name, buffer in model.named_buffers()
    }


# --- updates without an optimiser ----------------------------------------------------------------

_SEEN_UPDATES = 3
_READ_PARAMETERS, _READ_ELEMENTS = 8, 16  # of which a change is noticed


class OwnUpdates:
    """Notices a script that changes its weights without an optimiser of torch.optim.

    on_update: called within the backward pass after the third change.
    """

    def __init__(self, modules: CalledModules, on_update: Callable[[], None]) -> None:
        self._modules = modules
        self._on_update = on_update
        self._before: list[Tensor] = []
        self._updates = 0
        self._is_looking = True

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Look at the weights after each backward pass, until `stop` or the end of the context."""
        with replaced(torch.autograd, "backward", self._backward):
            yield

    def stop(self) -> None:
        self._is_looking = False

    def _backward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if self._is_looking:
            self._look()
        return result

    def _look(self) -> None:
        found = [
            parameter.detach().flatten()[:_READ_ELEMENTS].clone()
            for model in self._modules.models().values()
            for parameter in islice(model.parameters(), _READ_PARAMETERS)
            if not isinstance(parameter, DTensor)
        ]
        pairs = zip(self._before, found, strict=False)
        if any(a.shape == b.shape and not torch.equal(a, b) for a, b in pairs):
            self._updates += 1
        self._before = found
        if self._updates == _SEEN_UPDATES:
            self.stop()
            self._on_update()
