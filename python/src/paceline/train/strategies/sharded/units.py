"""Parts of a model whose parameters are gathered together, found by a pass without computing.

A module can be a unit if its parameters are needed only while it is called: then they can be
gathered before the call and released after it. Tied weights, and those that a functional call of
another module uses, belong to the modules around all of their uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.base.errors import UsageError
from paceline.base.torch_internals import tree_leaves
from paceline.train.training.fake_tensors import as_fake, evaluating, fake_mode

# Shares of the whole model. Larger modules are divided, because the memory of a unit is needed
# beside the shards; smaller ones stay in the module around them, because each unit is a message.
_LARGEST, _SMALLEST = 1 / 16, 1 / 1000


def find_units(model: nn.Module, example: Tensor) -> list[nn.Module]:
    """Return modules of a model that can be units, none of which contains another.

    Parameters outside of them belong to the whole model. example: an input of the model.
    Raises UsageError if the model cannot be passed without computing.
    """
    uses = _parameter_uses(model, example)
    whole = _elements(model)

    def units(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            size = _elements(child)
            if size < _SMALLEST * whole:
                continue
            parts = list(units(child)) if size > _LARGEST * whole else []
            if parts:
                yield from parts
            elif uses.only_within(child):
                yield child
            else:
                yield from units(child)

    return list(dict.fromkeys(units(model)))


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass
class _Uses:
    """The modules that are called at each use of a parameter."""

    callers: dict[int, list[frozenset[int]]] = field(default_factory=lambda: defaultdict(list))
    called: list[int] = field(default_factory=list)  # those that are called now

    def only_within(self, module: nn.Module) -> bool:
        """Return whether a call of this module surrounds every use of its parameters."""
        uses = [use for p in module.parameters() for use in self.callers[id(p)]]
        return bool(uses) and all(id(module) in use for use in uses)

    def begin(self, module: nn.Module, _inputs: Any) -> None:
        self.called.append(id(module))

    def end(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self.called.pop()


class _Watch(TorchFunctionMode):
    """Notes each function that gets a parameter."""

    def __init__(self, uses: _Uses, parameters: Mapping[int, int]) -> None:
        super().__init__()
        self._uses, self._parameters = uses, parameters

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for each in tree_leaves((args, kwargs)):
            if id(each) in self._parameters:
                callers = frozenset(self._uses.called)
                self._uses.callers[self._parameters[id(each)]].append(callers)
        return func(*args, **kwargs)


def _parameter_uses(model: nn.Module, example: Tensor) -> _Uses:
    """Pass the model with fake tensors, and note which modules use which parameters."""
    uses, mode = _Uses(), fake_mode()
    named = dict(model.named_parameters())
    fake = {n: as_fake(mode, t) for n, t in (*named.items(), *model.named_buffers())}
    hooks: list[RemovableHandle] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(uses.begin))
        hooks.append(module.register_forward_hook(uses.end))
    watch = _Watch(uses, {id(fake[name]): id(parameter) for name, parameter in named.items()})
    try:
        with mode, evaluating(model), watch:
            functional_call(model, fake, (as_fake(mode, example),))
    except Exception as error:  # any model of a user
        raise UsageError(
            'local_strategy "sharded": it needs to pass the model with tensors without memory, '
            f"which failed: {type(error).__name__}: {error}; use another local_strategy"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return uses
