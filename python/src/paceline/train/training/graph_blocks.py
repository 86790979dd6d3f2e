"""Split a model that is no sequence into blocks, at the places where one tensor is alive.

torch.fx traces the model's forward into a graph of layers and operations. Between two of them the
model can be split if a single tensor is used later, for example between residual blocks. A layer
that cannot be traced, because its Python code depends on values or shapes, stays whole.

torch.fx replaces parts of torch in the whole process while it traces, so no other thread may use a
model meanwhile.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.base.errors import UsageError
from paceline.train.training.tensors import evaluating, fake_mode

_WHAT_TO_DO = "define blocks(model), so that calling the blocks in turn is the model's forward"
_SAMPLES = (2, 3)  # of the passes that show which tensors have a row for each sample

Blocks = list[tuple[str, nn.Module]]  # names and layers of a model in order


def graph_blocks(model: nn.Module, example: Tensor) -> Blocks:
    """Return consecutive blocks of the model by name, with its own parameters.

    A block that is a layer of the model has its name there. example: an input of one sample.
    Raises UsageError that names the layer which cannot be traced, or whose output is used so late
    that there is no place to split.
    """
    graph = _traced(model)
    calls = Counter(n.target for n in graph.nodes if n.op == "call_module")
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    if len(inputs) != 1:
        raise UsageError(f"its forward has {len(inputs)} inputs, expected one; {_WHAT_TO_DO}")
    steps = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    rows = _tensors_of_samples(model, graph, example)
    pieces: list[_Piece] = []
    begin, entering = 0, inputs[0]
    for number, alive in enumerate(_alive_after(inputs[0], steps)):
        is_last = number == len(steps) - 1
        if is_last or (len(alive) == 1 and alive[0] in rows and not _divides(model, steps, number)):
            leaving = _result(graph) if is_last else alive[0]
            own = steps[begin : number + 1]
            is_shared = any(calls[step.target] > 1 for step in own)
            pieces.append(_Piece(own, entering, leaving, is_shared))
            begin, entering = number + 1, leaving
    if len(pieces) < 2 < len(steps):
        raise UsageError(f"{_longest_lived(inputs[0], steps)}; {_WHAT_TO_DO}")
    return _named(model, pieces)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive steps of the graph, of which one tensor enters and one leaves."""

    steps: Sequence[fx.Node]
    entering: fx.Node
    leaving: fx.Node
    is_shared: bool  # whether a layer is called elsewhere, too

    def module(self, model: nn.Module) -> nn.Module:
        """Return the only layer itself, or a module with all steps and the model's own layers."""
        only = self.steps[0]
        is_layer = only.op == "call_module" and only.args == (self.entering,) and not only.kwargs
        if len(self.steps) == 1 and is_layer and not self.is_shared:
            return model.get_submodule(str(only.target))
        graph = fx.Graph()
        copies = {self.entering: graph.placeholder("inputs")}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # a parameter or buffer
                copies[node] = graph.node_copy(node, copied)
            return copies[node]

        for step in self.steps:
            copies[step] = graph.node_copy(step, copied)
        graph.output(copies[self.leaving])
        module = fx.GraphModule(model, graph)
        module.inplace = any(_changes(model, s, self.entering) for s in self.steps)  # type: ignore[assignment]
        return module


class _Tracer(fx.Tracer):
    """Traces into all layers but those of torch, those of Paceline and `whole`."""

    def __init__(self, whole: set[str]) -> None:
        super().__init__()
        self.whole = whole
        self.failed = ""  # the innermost layer in which tracing failed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_own = type(m).__module__.startswith("paceline.")
        is_whole = module_qualified_name in self.whole or is_own
        return is_whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise


def _traced(model: nn.Module) -> fx.Graph:
    """Trace the model; keep layers whole that cannot be traced.

    Arguments of the forward with a default have that value.
    """
    whole: set[str] = set()
    parameters = inspect.signature(model.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    while True:
        tracer = _Tracer(whole)
        try:
            graph = tracer.trace(model, concrete_args=defaults)
        except Exception as error:  # noqa: BLE001  (the code of a user, run with proxies)
            if not tracer.failed or tracer.failed in whole:
                name = type(model).__name__
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise UsageError(f"torch.fx cannot trace {name}: {reason}; {_WHAT_TO_DO}") from None
            whole.add(tracer.failed)
        else:
            _remove_last_inputs(graph, len(defaults))
            return graph


def _remove_last_inputs(graph: fx.Graph, count: int) -> None:
    """Remove inputs whose values are fixed, with the checks of these values."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    doomed = set(inputs[len(inputs) - count :])
    for node in graph.nodes:
        if doomed & set(node.all_input_nodes):
            doomed.add(node)
    for node in reversed(list(graph.nodes)):
        if node in doomed:
            graph.erase_node(node)


def _alive_after(entering: fx.Node, steps: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the values that are used later, after each step."""
    place = {step: number for number, step in enumerate(steps)}
    end = len(steps)
    last_use = {
        node: max((place.get(user, end) for user in node.users), default=-1)
        for node in (entering, *steps)
    }
    made = {entering: -1, **place}
    return [[n for n in made if made[n] <= number < last_use[n]] for number in range(len(steps))]


def _result(graph: fx.Graph) -> fx.Node:
    (output,) = (n for n in graph.nodes if n.op == "output")
    result = output.args[0]
    if not isinstance(result, fx.Node):
        raise UsageError(f"its forward returns more than one tensor; {_WHAT_TO_DO}")
    return result


def _tensors_of_samples(model: nn.Module, graph: fx.Graph, example: Tensor) -> set[fx.Node]:
    """Return the values that can cross a split point: floating point, one row for each sample."""
    shapes: list[dict[fx.Node, tuple[bool, tuple[int, ...]]]] = []
    for samples in _SAMPLES:
        follower = _Shapes(fx.GraphModule(model, graph))
        first = next(model.parameters())
        mode = fake_mode()
        try:
            with evaluating(model), torch.no_grad():
                batch = example.to(first.device).expand(samples, *example.shape[1:])
                if first.is_meta:
                    follower.run(batch)
                else:
                    with mode:
                        follower.run(mode.from_tensor(batch))
        except Exception as error:  # noqa: BLE001  (the code of a user)
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UsageError(
                f"its forward fails for {samples} samples like example_input() ({reason}); define "
                f"example_input(), or {_WHAT_TO_DO}"
            ) from None
        shapes.append(follower.found)
    few, more = shapes
    return {
        node
        for node, (is_float, shape) in few.items()
        if is_float and shape[:1] == _SAMPLES[:1] and more[node][1] == (_SAMPLES[1], *shape[1:])
    }


class _Shapes(fx.Interpreter):
    """Passes through a graph and notes the tensors: whether they are of floating point, shape."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[fx.Node, tuple[bool, tuple[int, ...]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.found[n] = (result.is_floating_point(), tuple(result.shape))
        return result


def _divides(model: nn.Module, steps: Sequence[fx.Node], number: int) -> bool:
    """Return whether a layer with buffers is called both before and after a split point.

    Its statistics would be those of two stages.
    """
    before, after = (
        {s.target for s in part if s.op == "call_module"}
        for part in (steps[: number + 1], steps[number + 1 :])
    )
    both = before & after
    return any(list(model.get_submodule(str(name)).buffers()) for name in both)


def _changes(model: nn.Module, step: fx.Node, value: fx.Node) -> bool:
    """Return whether a step works in place on a value."""
    if not step.args or step.args[0] is not value:
        return False
    if step.op == "call_module":
        return bool(getattr(model.get_submodule(str(step.target)), "inplace", False))
    name = step.target if isinstance(step.target, str) else getattr(step.target, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("i") and hasattr(torch.Tensor, f"__{name}__")
    return is_method or is_operator or bool(step.kwargs.get("inplace"))


def _longest_lived(entering: fx.Node, steps: Sequence[fx.Node]) -> str:
    """Say which value crosses the most places, so that the model cannot be split there."""
    place = {step: number for number, step in enumerate(steps)}
    spans = {
        node: max((place[user] for user in node.users if user in place), default=0)
        - place.get(node, -1)
        for node in (entering, *steps)
    }
    node = max(spans, key=lambda n: spans[n])
    user = max((u for u in node.users if u in place), key=lambda u: place[u], default=node)
    made = "its input" if node is entering else f"the output of {node.target}"
    return f"no place has a single tensor alive: {made} is used again by {user.target}"


def _named(model: nn.Module, pieces: Sequence[_Piece]) -> Blocks:
    """Name each block by its layers, each name once."""
    names = [_name(piece) for piece in pieces]
    count, seen = Counter(names), Counter[str]()
    blocks = []
    for name, piece in zip(names, pieces, strict=True):
        module = piece.module(model)
        seen[name] += 1
        is_layer = dict(model.named_modules()).get(name) is module
        label = name if count[name] == 1 or is_layer else f"{name}#{seen[name]}"
        blocks.append((label, module))
    return blocks


def _name(piece: _Piece) -> str:
    layers = [str(step.target) for step in piece.steps if step.op == "call_module"]
    if not layers:
        return piece.steps[0].name
    if len(layers) == 1:
        return layers[0]
    parts = zip(*(layer.split(".") for layer in layers), strict=False)
    common = itertools.takewhile(lambda same: len(set(same)) == 1, parts)
    return ".".join(same[0] for same in common) or layers[0]
