"""What each operation has to give, from the values of all ranks, without communicating."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tests.contract.programs.fuzz_cases import Case, values
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_EXACTLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum,
    "MAX": torch.maximum, "BAND": torch.bitwise_and, "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}  # fmt: skip
_OF_BOOLEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.logical_or,
    "PRODUCT": torch.logical_and,
}


@dataclass(frozen=True)
class Want:
    """A result, and how far an element of it may be off; None means by no bit."""

    tensor: Tensor  # float64 holds what is not exact; longdouble below
    precise: NDArray[np.longdouble] | None = None
    bound: NDArray[np.longdouble] | None = None  # if it is summed in float32 or better
    loose: NDArray[np.longdouble] | None = None  # if it is rounded after every step


def reduced(case: Case, tensors: Sequence[Tensor]) -> Want:
    """The reduction of all ranks' tensors.

    Of integers torch's own, which wraps as every library's does. Minimum and maximum are exact.
    For n floats, whatever the order, |sum - exact| <= (n - 1) eps sum |x| to first order (Higham:
    Accuracy and Stability of Numerical Algorithms, 4.2); n eps leaves room for the second order
    and for the division of an average. Likewise (n - 1) eps |product|. What is kept in 16 bits but
    summed in 32 is rounded once more.
    """
    dtype = case.torch_dtype
    if not dtype.is_floating_point or case.reduction in ("MIN", "MAX"):
        return Want(_exactly(case, tensors))
    numbers = [tensor.double().numpy().astype(np.longdouble) for tensor in tensors]
    if case.reduction == "PRODUCT":
        precise = functools.reduce(np.multiply, numbers)
        magnitude = np.abs(precise)
    else:
        divisor = len(numbers) if case.reduction == "AVG" else 1
        precise = functools.reduce(np.add, numbers) / divisor
        magnitude = functools.reduce(np.add, [np.abs(x) for x in numbers]) / divisor
    own = torch.finfo(dtype)
    inside = torch.finfo(torch.float32) if dtype in _HALVES else own
    count = len(numbers)
    rounding = own.eps * np.abs(precise) if dtype in _HALVES else 0.0
    return Want(
        torch.empty(0, dtype=dtype),
        precise,
        bound=count * inside.eps * magnitude + rounding + own.smallest_normal * own.eps,
        # a step's rounding error grows with those after it
        loose=count * own.eps * (1 + own.eps) ** count * magnitude + own.smallest_normal,
    )


def _exactly(case: Case, tensors: Sequence[Tensor]) -> Tensor:
    table = {**_EXACTLY, **(_OF_BOOLEANS if case.torch_dtype == torch.bool else {})}
    if case.reduction != "AVG":
        return functools.reduce(table[case.reduction], tensors)
    # an average fits where the sum may not; the backend says so of 8 and 16 bits
    wide = [t.int() if t.element_size() < torch.int32.itemsize else t for t in tensors]
    total = functools.reduce(torch.add, wide)
    return torch.div(total, len(tensors), rounding_mode="trunc").to(case.torch_dtype)


def part_of(want: Want, rows: slice) -> Want:
    """Some rows of a result."""
    if want.precise is None:
        return Want(want.tensor[rows])
    assert want.bound is not None
    assert want.loose is not None
    return Want(want.tensor, want.precise[rows], want.bound[rows], want.loose[rows])


def difference(got: Tensor, want: Want, *, loose: bool) -> str | None:
    """What is wrong with a result; None if nothing is."""
    if want.precise is None:
        if got.shape != want.tensor.shape or got.dtype != want.tensor.dtype:
            return f"expected {want.tensor.shape} {want.tensor.dtype}, got {got.shape} {got.dtype}"
        differing = got.ne(want.tensor)
        if not differing.any():
            return None
        index = tuple(differing.nonzero()[0].tolist())
        return (
            f"{int(differing.sum())} of {got.numel()} elements differ; at {index} expected "
            f"{want.tensor[index].item()}, got {got[index].item()}"
        )
    bound = want.loose if loose else want.bound
    assert bound is not None
    if got.shape != want.precise.shape:
        return f"expected shape {want.precise.shape}, got {tuple(got.shape)}"
    off = np.abs(got.double().numpy() - want.precise)
    wrong = ~(off <= bound)  # so that NaN is wrong
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {got.numel()} elements are out of bounds; at {index} expected "
        f"{want.precise[index]} +- {bound[index]}, got {got[index].item()}"
    )


def wanted(case: Case, rank: int) -> list[Want]:
    """What `Attempt.results` of that rank of the group must hold."""
    return _WANTED[case.operation](case, rank)


def _reduced(case: Case, part: int = 0) -> Want:
    return reduced(case, [values(case, rank, part) for rank in range(case.size)])


def _of_all(case: Case) -> list[Want]:
    return [Want(values(case, rank)) for rank in range(case.size)]


def _scattered_rows(case: Case, rank: int) -> list[Want]:
    joint = [values(case, r, shape=case.joint_shape) for r in range(case.size)]
    return [part_of(reduced(case, joint), slice(rank * case.shape[0], (rank + 1) * case.shape[0]))]


def _from_every_list(case: Case, rank: int) -> list[Want]:
    shapes = [(case.rows[source][rank], *case.shape[1:]) for source in range(case.size)]
    return [Want(values(case, source, rank, shape)) for source, shape in enumerate(shapes)]


def _rows_for(case: Case, source: int, rank: int) -> Tensor:
    sent = case.rows[source]
    whole = values(case, source, shape=(sum(sent), *case.shape[1:]))
    start = sum(sent[:rank])
    return whole[start : start + sent[rank]]


def _from_the_rank_before(case: Case, rank: int) -> list[Want]:
    return [Want(values(case, (rank - 1) % case.size))]


_WANTED: dict[str, Callable[[Case, int], list[Want]]] = {
    "all_reduce": lambda case, _: [_reduced(case)],
    "all_reduce_coalesced": lambda case, _: [_reduced(case, part) for part in range(case.tensors)],
    "reduce": lambda case, rank: [_reduced(case)] if rank == case.root else [],
    "reduce_scatter": lambda case, rank: [_reduced(case, rank)],
    "reduce_scatter_tensor": _scattered_rows,
    "broadcast": lambda case, _: [Want(values(case, case.root))],
    "all_gather": lambda case, _: _of_all(case),
    "all_gather_uneven": lambda case, _: [
        Want(values(case, rank, shape=case.uneven_shape(rank))) for rank in range(case.size)
    ],
    "all_gather_into_tensor": lambda case, _: [
        Want(torch.cat([values(case, rank) for rank in range(case.size)]))
    ],
    "gather": lambda case, rank: _of_all(case) if rank == case.root else [],
    "scatter": lambda case, rank: [Want(values(case, case.root, rank))],
    "all_to_all": _from_every_list,
    "all_to_all_single": lambda case, rank: [
        Want(torch.cat([_rows_for(case, source, rank) for source in range(case.size)]))
    ],
    "ring": _from_the_rank_before,
    "blocking_ring": _from_the_rank_before,
    "batched_ring": _from_the_rank_before,
    "barrier": lambda _case, _rank: [],
}
