"""Check the arguments of collectives before anything begins, and put calls in words.

A call with wrong arguments raises ValueError on the rank that made it, and its group goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.buffers import Reduction, is_dense

_WORDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "add": "sum",
    "multiply": "product",
    "minimum": "min",
    "maximum": "max",
}


def described(name: str, tensors: Sequence[Tensor], *details: object) -> str:
    """Return a call in words that are the same on all ranks: "all_reduce sum 10 of float32".

    tensors: those whose sizes and types all ranks give alike.
    """
    if len(tensors) == 1:  # the most frequent case, in less time
        (only,) = tensors
        return f"{_phrase(name, *details)} {only.numel()} of {_type_name(only.dtype)}"
    sizes = ", ".join([f"{each.numel()} of {_type_name(each.dtype)}" for each in tensors])
    return f"{_phrase(name, *details)} {sizes}"


@cache
def _phrase(*words: object) -> str:
    return " ".join([_WORDS.get(word, word) for word in map(str, words)])


@cache
def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_of(reductions: Sequence[Reduction]) -> str:
    return reductions[0].name if reductions else ""


def elements_sent(method: str, arguments: Sequence[Any], ranks: int) -> tuple[list[int], list[int]]:
    """Return how many elements an all-to-all sends to each rank, and expects from each."""
    outputs, inputs = arguments[:2]
    if method == "alltoall":
        return [each.numel() for each in inputs], [each.numel() for each in outputs]
    sizes = [*arguments[2:4], None, None]
    return _shares(inputs, sizes[1], ranks), _shares(outputs, sizes[0], ranks)


def _shares(tensor: Tensor, sizes: Sequence[int] | None, ranks: int) -> list[int]:
    if not sizes:
        return [tensor.numel() // ranks] * ranks
    row = tensor.numel() // max(1, tensor.shape[0])
    return [size * row for size in sizes]


def tensors_in(argument: Any) -> list[Tensor]:
    """Return the tensors of an argument: a tensor, or lists of them."""
    if isinstance(argument, Tensor):
        return [argument]
    return [*chain(*map(tensors_in, argument))]


def root_of(opts: Any, ranks: int) -> int:
    """Return the root of a call. Raises ValueError if there is no such rank."""
    root: int = opts.rootRank
    if not 0 <= root < ranks:
        raise ValueError(f"expected a root below {ranks}, the number of ranks, got {root}")
    return root


def check_parts(name: str, parts: Sequence[Tensor], own: Tensor, rank: int, ranks: int) -> None:
    """Raise ValueError unless there is a part for each rank, that of this one like `own`."""
    if len(parts) != ranks:
        raise ValueError(f"{name}: expected {ranks} tensors, got {len(parts)}")
    check_sizes(name, own, [parts[rank]])
    types = {part.dtype for part in parts}
    if len(types) > 1:
        raise ValueError(f"{name}: expected tensors of one type, got {types}")


def check_whole(name: str, whole: Tensor, own: Tensor, ranks: int) -> None:
    """Raise ValueError unless a tensor has one part like `own` for each rank."""
    expected, found = own.numel() * ranks, whole.numel()
    if (found, whole.dtype) != (expected, own.dtype):
        raise ValueError(
            f"{name}: expected {expected} elements of {own.dtype} for {ranks} ranks with "
            f"{own.numel()} each, got {found} of {whole.dtype}"
        )


def check_sizes(name: str, own: Tensor, others: Sequence[Tensor]) -> None:
    """Raise ValueError if the root's tensors have other sizes than its own: the others would wait
    for bytes that never come."""
    found = {(each.dtype, each.numel()) for each in others}
    if found != {(own.dtype, own.numel())}:
        raise ValueError(
            f"{name}: expected {own.numel()} elements of {own.dtype} for each rank, got "
            f"{[(each.numel(), each.dtype) for each in others]}"
        )


def check_elements(results: Any) -> None:
    """Raise ValueError if elements of a result share memory, as those of an expanded tensor do."""
    for tensor in [results] if isinstance(results, Tensor) else results:
        if not is_dense(tensor) or tensor.is_contiguous():
            continue
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                "expected a result whose elements have memory of their own, got an expanded "
                "tensor; give its .contiguous()"
            )
