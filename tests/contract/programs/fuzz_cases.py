"""Random cases of communication: every rank draws the same ones from a seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
# Each moves or reduces what `Case` says; fuzz_operations.py does it.
REDUCING = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
)  # fmt: skip
MOVING = (
    "broadcast", "all_gather", "all_gather_uneven", "all_gather_into_tensor", "gather", "scatter",
    "all_to_all", "all_to_all_single", "ring", "blocking_ring", "batched_ring", "barrier",
)  # fmt: skip
LAYOUTS = ("contiguous", "contiguous", "transposed", "strided", "offset")
INPUT_LAYOUTS = (*LAYOUTS, "expanded")  # several elements in the same memory: only to be read
ALGORITHMS = (
    "auto", "ring", "recursive-doubling", "rabenseifner", "hierarchical", "naive",
    "parameter-server", "native",
)  # fmt: skip
_REDUCTIONS = ("SUM", "SUM", "AVG", "PRODUCT", "MIN", "MAX")
_BITWISE = ("BAND", "BOR", "BXOR")
_LONGEST = 100_000
_BEYOND_A_PIECE = 1_500_000  # elements: the backend goes through larger tensors in pieces


@dataclass(frozen=True)
class Case:
    """Ranks are those of the group, counted from 0 in the order of `members`."""

    seed: int
    number: int
    operation: str
    dtype: str
    shape: tuple[int, ...]
    members: tuple[int, ...]
    reduction: str = "SUM"
    algorithm: str = "auto"
    root: int = 0
    asynchronous: bool = False
    waits: bool = True  # for all operations under way, once this one has begun
    input_layout: str = "contiguous"
    output_layout: str = "contiguous"
    wild: bool = False  # integers that overflow, floats of very different size
    tag: int = 0
    tensors: int = 1  # of a coalesced operation
    rows: tuple[tuple[int, ...], ...] = field(default=())  # first dimensions, from rank to rank

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def joint_shape(self) -> tuple[int, ...]:
        """Of all ranks' tensors one after the other."""
        return (self.size * self.shape[0], *self.shape[1:])

    def uneven_shape(self, rank: int) -> tuple[int, ...]:
        return (self.rows[0][rank], *self.shape[1:])

    def __str__(self) -> str:
        return f"case {self.number} of seed {self.seed}: {asdict(self)}"


def draw(seed: int, number: int, ranks: int, subsets: int) -> Case:
    """Case `number`, whatever cases came before. subsets: how many groups are used at most."""
    rng = random.Random(f"{seed}/{number}/{ranks}")
    operation = rng.choice(("all_reduce",) * 3 + REDUCING * 2 + MOVING)
    members = _members(random.Random(f"{seed}/{rng.randrange(subsets)}/{ranks}"), ranks)
    if operation == "blocking_ring" and len(members) == 1:
        operation = "ring"  # who waits for itself waits in vain
    dtype, reduction = _type(rng, operation)
    shape = _shape(rng, operation)
    if operation in ("all_reduce", "broadcast") and rng.random() < 0.02:
        shape = (_BEYOND_A_PIECE + rng.randrange(1000),)
    return Case(
        seed=seed,
        number=number,
        operation=operation,
        dtype=dtype,
        shape=shape,
        members=members,
        reduction=reduction,
        # of the group of all ranks alone, or there would be very many groups
        algorithm=rng.choice(ALGORITHMS) if len(members) == ranks > 1 else "auto",
        root=rng.randrange(len(members)),
        asynchronous=rng.random() < 0.5,
        waits=rng.random() < 0.5,
        input_layout=rng.choice(INPUT_LAYOUTS),
        output_layout=rng.choice(LAYOUTS),
        wild=rng.random() < 0.5,
        tag=rng.choice((0, 1, 7, 40_000)),
        tensors=rng.randint(1, 4),
        rows=_rows(rng, operation, len(members)),
    )


def values(case: Case, rank: int, part: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
    """What `rank` gives as its tensor `part`: the same on whichever rank this is called."""
    shape = case.shape if shape is None else shape
    rng = np.random.default_rng([case.seed, case.number, rank, part])
    dtype = case.torch_dtype
    if dtype == torch.bool:
        drawn = torch.from_numpy(np.asarray(rng.random(shape) < 0.5))
    elif dtype.is_floating_point:
        drawn = torch.from_numpy(np.asarray(_floats(rng, case, shape))).to(dtype)
    else:
        limits = torch.iinfo(dtype)
        low, high = (limits.min, limits.max) if case.wild else (max(limits.min, -3), 5)
        drawn = torch.from_numpy(np.asarray(rng.integers(low, high, shape, endpoint=True)))
        drawn = drawn.to(dtype)
    if case.input_layout == "expanded" and shape and shape[0] > 1:
        drawn = drawn[:1].expand(shape).contiguous()
    return drawn


def _floats(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    if case.reduction == "PRODUCT":  # four of them stay within the range of float16
        return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.25, 4.0, shape)
    numbers = rng.standard_normal(shape)
    return numbers * 10.0 ** rng.uniform(-3, 2, shape) if case.wild else numbers


def _members(rng: random.Random, ranks: int) -> tuple[int, ...]:
    """Any ranks; often all of them."""
    if rng.random() < 0.4:
        return tuple(range(ranks))
    return tuple(sorted(rng.sample(range(ranks), rng.randint(1, ranks))))


def _type(rng: random.Random, operation: str) -> tuple[str, str]:
    if operation not in REDUCING:
        return rng.choice((*FLOATS, *INTEGERS, "bool")), "SUM"
    dtype = rng.choice((*FLOATS, *FLOATS, *INTEGERS, "bool"))
    if dtype in FLOATS:
        return dtype, rng.choice(_REDUCTIONS)
    if dtype == "bool":
        return dtype, rng.choice(("SUM", "PRODUCT", "MIN", "MAX", *_BITWISE))
    return dtype, rng.choice((*_REDUCTIONS, *_BITWISE))


def _shape(rng: random.Random, operation: str) -> tuple[int, ...]:
    least = 1 if operation.endswith(("_tensor", "_single", "_uneven", "to_all")) else 0
    dimensions = rng.randint(least, 4)
    elements = rng.choice((0, 1, 20, 20, 500, 5_000, _LONGEST))
    if elements == 0 and dimensions:
        shape = [rng.randint(1, 3) for _ in range(dimensions)]
        shape[rng.randrange(dimensions)] = 0
        return tuple(shape)
    shape = []
    for _ in range(dimensions - 1):
        shape.append(rng.randint(1, 1 + min(elements, 7)))
        elements //= shape[-1]
    if dimensions:
        shape.append(rng.randint(1, 1 + max(elements - 1, 0)))
    rng.shuffle(shape)
    return tuple(shape)


def _rows(rng: random.Random, operation: str, size: int) -> tuple[tuple[int, ...], ...]:
    if not operation.startswith("all_to_all") and operation != "all_gather_uneven":
        return ()
    if rng.random() < 0.3:  # all alike
        return ((rng.randint(0, 5),) * size,) * size
    return tuple(tuple(rng.randint(0, 9) for _ in range(size)) for _ in range(size))
