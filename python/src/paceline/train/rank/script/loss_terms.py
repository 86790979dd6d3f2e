"""The terms of a loss, from autograd's graph: where many numbers become one.

The gradient that arrives at a term, over the elements of which it takes the mean, is the weight of
an element in the step. Nodes are found before the backward pass, and gradients noted during it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.base.torch_internals.autograd import (
    is_of_data,
    is_scalar,
    leaves_out,
    lets_through,
    operands,
    reduced_rows,
    reduction,
    shape,
    summed_numbers,
)
from paceline.measure.records.own_steps import LossTerm

_MOST_NODES = 20_000
_MOST_TERMS = 256
# A stack of so many losses is followed to each of them; longer ones have one for each sample.
_FEW = 8
_PRODUCTS = ("MmBackward", "BmmBackward")
_DISTANCES = ("CdistBackward", "EuclideanDistBackward")
_ELEMENTWISE = (
    *("AddBackward", "SubBackward", "MulBackward", "DivBackward"),
    *("MinimumBackward", "MaximumBackward"),
)
_SINK = "_DDPSink"  # lets each output of a model through, to the input of the same number
_LINEAR = (
    *("Add", "Sub", "Rsub", "Neg", "Mean", "Sum", "Stack", "Cat", "Select", "Unbind", "View"),
    *("Reshape", "Squeeze", "Unsqueeze", "Expand", "ToCopy", "Clone", "Alias", "Identity"),
    *("BackwardHook", _SINK, "UnsafeView"),
)


class LossTerms:
    """Notes the terms of the losses of backward passes."""

    def __init__(self) -> None:
        self._found: list[LossTerm] = []

    def follow(self, loss: Tensor, number: int) -> None:
        """Note the terms of a loss during its next backward pass."""
        for node, is_linear in _terms(loss.grad_fn, loss.output_nr):
            elements, is_mean = reduction(node)
            term = LossTerm(
                number=number,
                kind=node.name(),
                elements=elements,
                is_mean=is_mean,
                is_linear=is_linear,
                gradient=0.0,
                leaves_out=leaves_out(node),
                numbers=summed_numbers(node),
            )
            node.register_prehook(partial(self._note, term))

    def _note(self, term: LossTerm, gradients: tuple[Any, ...]) -> None:
        first = gradients[0]
        if isinstance(first, Tensor) and first.numel() == 1:
            self._found.append(replace(term, gradient=_finite(first)))

    def take(self) -> list[LossTerm]:
        found, self._found = self._found, []
        return found


def _terms(root: Any, number: int) -> list[tuple[Any, bool]]:
    """Return the nodes that make one number of many, nearest to the loss.

    With each of them, whether the loss is linear in it. number: of the result of the root.
    """
    found: list[tuple[Any, bool]] = []
    seen = {(root, number)}
    rest = [(root, number, True)]
    while rest and len(found) < _MOST_TERMS and len(seen) < _MOST_NODES:
        node, number, linear = rest.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            continue
        inputs = [(each, place) for each, place in node.next_functions if each is not None]
        if node.name().startswith(_SINK) and len(node.next_functions) > number:
            inputs = [node.next_functions[number]]
        scalars = [each for each in inputs if is_scalar(*each)]
        if len(scalars) < len(inputs):
            stack = inputs[0][0] if len(inputs) == 1 else None
            if stack is None or not _stacks_few_scalars(stack):
                found.append((node, linear))
                continue
            scalars = [each for each in stack.next_functions if each[0] is not None]
        linear = linear and _is_linear(node, len(inputs))
        for each in scalars:
            if each not in seen:
                seen.add(each)
                rest.append((*each, linear))
    return found


def _is_linear(node: Any, inputs: int) -> bool:
    """Return whether the result of a node is linear in its inputs."""
    name = node.name()
    if name.startswith(("MulBackward", "DivBackward")):
        return inputs == 1
    return bool(name.startswith(_LINEAR)) or (inputs == 1 and lets_through(node))


def _stacks_few_scalars(node: Any) -> bool:
    parts = [(each, place) for each, place in node.next_functions if each is not None]
    return (
        node.name().startswith(("StackBackward", "CatBackward"))
        and len(parts) <= _FEW
        and all(is_scalar(each, place) for each, place in parts)
    )


def _finite(value: Tensor) -> float:
    number = float(value.detach())
    return number if math.isfinite(number) else 0.0


def loses_gradient(loss: Tensor, gathered: list[Tensor], ranks: int) -> bool:
    """Return whether a loss depends on gathered tensors that have no gradient.

    gathered: results of all_gather, one list of `ranks` after the other.
    """
    sums = [(each.numel(), float(each.double().sum())) for each in _together(gathered, ranks)]
    for node in _nodes(loss.grad_fn):
        name = node.name()
        if name.startswith(("CatBackward", "StackBackward")):
            parts = [each for each, _ in node.next_functions]
            if len(parts) == ranks and None in parts:
                return True
        if name.startswith(("MmBackward", "BmmBackward", "MulBackward")):
            for saved in operands(node):
                if not saved.requires_grad:
                    size, total = saved.numel(), float(saved.detach().double().sum())
                    if any(size == n and math.isclose(total, s, rel_tol=1e-6) for n, s in sums):
                        return True
    return False


@dataclass(frozen=True, slots=True)
class Product:
    """Something of each row of one matrix with each row of another, n by k and k by m.

    Both depend on rows of the model's input. k is 0 if it is no sum of products over k. n and m are
    0 if it is a sum over k rows in which the loss is not linear.
    """

    number: int  # of the backward pass
    n: int
    k: int
    m: int

    def mixes(self, rows: int, ranks: int) -> bool:
        """Return whether it combines rows: each with each other one, or by a sum over them.

        rows: of a call of the model on one of the ranks. There may be two results for each, and
        those of all ranks.
        """
        if rows < 2:
            return False
        each = [rows * times for times in range(1, 2 * ranks + 1)]
        return (self.n in each and self.m in each) or self.k in (rows, rows * ranks)


def products(loss: Tensor, number: int) -> list[Product]:
    """Return the products, distances and other pairs in a loss of two tensors of data.

    Those of attention are batches of products, one for each row, and are left out.
    """
    nodes = list(_nodes(loss.grad_fn))
    of_data = _of_data(nodes)
    found = []
    for node in nodes:
        inputs = [(each, place) for each, place in node.next_functions if each is not None]
        if not inputs or any(each not in of_data for each, _ in inputs):
            continue
        shapes = [shape(*each) for each in inputs]
        if None not in shapes and (sizes := _sizes(node, [s for s in shapes if s is not None])):
            found.append(Product(number, *sizes))
    return found + [Product(number, 0, rows, 0) for rows in _sums_of_rows(loss, of_data)]


def _sums_of_rows(loss: Tensor, of_data: Collection[Any]) -> set[int]:
    """Return the sizes of the first dimensions over which sums are taken, not linearly.

    Such as both sums of a ratio, or the square of a mean. Norms and deviations are not linear.
    """
    found: set[int] = set()
    root: Any = loss.grad_fn
    rest = [(root, True)] if root in of_data else []
    seen = set(rest)
    while rest and len(seen) < _MOST_NODES:
        node, linear = rest.pop()
        rows = reduced_rows(node) if node.next_functions else 0
        if rows and not (linear and node.name().startswith(("SumBackward", "MeanBackward"))):
            found.add(rows)
        inputs = [(place, each) for place, (each, _) in enumerate(node.next_functions)]
        inputs = [(place, each) for place, each in inputs if each in of_data]
        linear = linear and _is_linear_in_data(node, [place for place, _ in inputs])
        for _, each in inputs:
            if (each, linear) not in seen:
                seen.add((each, linear))
                rest.append((each, linear))
    return found


def _is_linear_in_data(node: Any, places: Sequence[int]) -> bool:
    """Return whether a result is linear in those of its inputs that depend on data."""
    name = node.name()
    if name.startswith("DivBackward"):
        return list(places) == [0]
    return len(places) == 1 if name.startswith("MulBackward") else _is_linear(node, len(places))


def _sizes(node: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Return n, k and m of a `Product`; None if the node is none."""
    first, *others = shapes
    if node.name().startswith("PdistBackward"):
        return first[0], 0, first[0]
    if len(node.next_functions) != 2 or len(others) != 1:
        return None
    [second] = others
    if node.name().startswith(_ELEMENTWISE):
        return _pairs(first, second)
    is_product = node.name().startswith(_PRODUCTS)
    if not is_product and not node.name().startswith(_DISTANCES):
        return None
    if min(len(first), len(second)) < 2 or set(first[:-2] + second[:-2]) - {1}:
        return None
    return (first[-2], first[-1], second[-1]) if is_product else (first[-2], 0, second[-2])


def _pairs(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return the sizes of operands of which one is broadcast along the rows of the other."""
    most = max(len(first), len(second))
    if most < 2:
        return None
    ours, theirs = ((1,) * (most - len(each)) + each for each in (first, second))
    for one, other in ((ours, theirs), (theirs, ours)):
        if one[1] == other[0] == 1 and min(one[0], other[1]) > 1:
            return one[0], 0, other[1]
    return None


def _of_data(nodes: Collection[Any]) -> set[Any]:
    """Return those of all nodes of a graph that depend on data."""
    users = defaultdict(list)
    for node in nodes:
        for each, _ in node.next_functions:
            users[each].append(node)
    rest = [node for node in nodes if is_of_data(node)]
    found = set(rest)
    while rest:
        new = [each for each in users[rest.pop()] if each not in found]
        found.update(new)
        rest += new
    return found


def takes_numbers(node: Any) -> bool:
    """Return whether all that a node gets are single numbers, such as the loss of a rank."""
    inputs = [(each, place) for each, place in node.next_functions if each is not None]
    return bool(inputs) and all(is_scalar(*each) for each in inputs)


def is_not_linear_in(loss: Tensor, nodes: Collection[Any]) -> bool:
    """Return whether a loss depends on one of these nodes, and is not linear in it.

    A rank's gradient of a loss that is linear in a sum over ranks is that of its own part.
    """
    seen: set[tuple[Any, bool]] = {(loss.grad_fn, True)} if loss.grad_fn is not None else set()
    rest = list(seen)
    while rest and len(seen) < _MOST_NODES:
        node, linear = rest.pop()
        if not linear and node in nodes:
            return True
        inputs = [each for each, _ in node.next_functions if each is not None]
        linear = linear and _is_linear(node, len(inputs))
        for each in inputs:
            if (each, linear) not in seen:
                seen.add((each, linear))
                rest.append((each, linear))
    return False


def _nodes(root: Any) -> Iterator[Any]:
    seen, rest = {root}, [root]
    while rest and len(seen) < _MOST_NODES:
        node = rest.pop()
        yield node
        for each, _ in node.next_functions:
            if each is not None and each not in seen:
                seen.add(each)
                rest.append(each)


def _together(gathered: list[Tensor], ranks: int) -> Iterator[Tensor]:
    for first in range(0, len(gathered) - ranks + 1, ranks):
        yield torch.cat([each.detach().reshape(-1) for each in gathered[first : first + ranks]])
