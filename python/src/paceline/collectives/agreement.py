"""Agreement of ranks on what they call, without which a sum would be of different things.

Each rank writes number and description of its call into shared memory before the first barrier of
the call, and compares all ranks' after it. So it costs no barrier of its own, except in calls that
have none. A rank can be at most one call ahead of a peer that compares: two records suffice.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.collectives.buffers import Reduction, is_dense
from paceline.collectives.errors import CallsDiffer, PacelineError, PeerLost, TimedOut

_HEAD = struct.Struct("QQ")  # number and checksum of a call
TEXT_BYTES = 240
_PLACE = struct.Struct(f"{TEXT_BYTES}s")
_RECORDS = 2


def agreement_bytes(size: int) -> int:
    """Return the shared bytes that `size` ranks need together."""
    return _RECORDS * size * (_HEAD.size + TEXT_BYTES)


def calls_differ(calls: Mapping[str, str]) -> CallsDiffer:
    """Return the error for all ranks. calls: by name of the rank."""
    callers: dict[str, list[str]] = {}
    for name, call in calls.items():
        callers.setdefault(call, []).append(name)
    said = "; ".join(f"{', '.join(names)}: {call}" for call, names in callers.items())
    return CallsDiffer(
        f"the ranks of the group call different things at the same time: {said}. "
        "All must make the same calls in the same order with the same sizes and types"
    )


class Agreement:
    """The calls of this rank and of the others of a host; one thread at a time uses it."""

    def __init__(
        self,
        memory: NDArray[np.uint8],
        rank: int,
        names: Sequence[str],
        barrier: Callable[[str], None],
    ) -> None:
        """memory: shape (agreement_bytes(ranks),), the same bytes on all ranks, at first 0.

        names: of the ranks. barrier: waits for all ranks in the operation of the given name.
        """
        self._rank, self._names, self._barrier = rank, names, barrier
        ranks = len(names)
        heads = _RECORDS * ranks * _HEAD.size
        self._heads = memory[:heads].reshape(_RECORDS, ranks * _HEAD.size)
        self._head_views = [memoryview(each) for each in self._heads]
        self._texts = memory[heads:].reshape(_RECORDS, ranks * TEXT_BYTES)
        self._text_views = [memoryview(each) for each in self._texts]
        self._number = 0
        self._all_equal = b""  # the heads of all ranks if they agree; empty once compared

    def begin(self, call: str) -> None:
        """Announce what this rank calls, for example "all_reduce 10 of float32"."""
        self._number += 1
        turn = self._number % _RECORDS
        text = call.encode()
        _PLACE.pack_into(self._text_views[turn], self._rank * TEXT_BYTES, text)
        head = _HEAD.pack(self._number, zlib.crc32(text))
        start = self._rank * _HEAD.size
        self._head_views[turn][start : start + _HEAD.size] = head
        self._all_equal = head * len(self._names)

    def synchronise(self, name: str) -> None:
        """Wait for all ranks. Raises CallsDiffer on all of them if they call different things."""
        if not self._all_equal:
            self._barrier(name)
            return
        try:
            self._barrier(name)
        except (PeerLost, TimedOut) as error:
            # A peer that has seen the difference first may have gone already.
            self._compare(error)
            raise
        self._compare(None)

    def end(self, name: str) -> None:
        """Compare in a call that has had no barrier."""
        if self._all_equal:
            self.synchronise(name)

    def _compare(self, reason: PacelineError | None) -> None:
        """reason: why not all ranks are here."""
        expected, self._all_equal = self._all_equal, b""
        turn = self._number % _RECORDS
        if self._head_views[turn] == expected:
            return
        heads = [_HEAD.unpack_from(self._head_views[turn], r * _HEAD.size) for r in self._ranks]
        number = heads[self._rank][0]
        here = [rank for rank in self._ranks if reason is None or heads[rank][0] == number]
        if len({heads[rank] for rank in here}) == 1:
            return  # the others have not come
        calls = {rank: self._text(rank) for rank in here}
        if len(set(calls.values())) == 1:  # one has made fewer calls before
            calls = {rank: f"call {heads[rank][0]}, {text}" for rank, text in calls.items()}
        raise calls_differ({self._names[rank]: text for rank, text in calls.items()}) from reason

    @property
    def _ranks(self) -> range:
        return range(len(self._names))

    def _text(self, rank: int) -> str:
        turn = self._number % _RECORDS
        (text,) = _PLACE.unpack_from(self._text_views[turn], rank * TEXT_BYTES)
        return bytes(text).rstrip(b"\0").decode(errors="ignore")


# --- arguments of collectives: checked before anything begins, and put in words ----------------
#
# A call with wrong arguments raises ValueError on the rank that made it, and its group goes on.

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


def check_counts(name: str, counts: NDArray[np.int64]) -> None:
    """Raise CallsDiffer if a rank sends another number of elements than its receiver expects.

    counts: shape (ranks, 2, ranks), by rank: elements that it sends to each rank, and that it
    expects from each; the same on all ranks.
    """
    differing = np.argwhere(counts[:, 0] != counts[:, 1].T)
    if len(differing):
        sender, receiver = map(int, differing[0])
        raise CallsDiffer(
            f"{_WORDS.get(name, name)}: rank {sender} of the group sends "
            f"{counts[sender, 0, receiver]} elements to rank {receiver}, which expects "
            f"{counts[receiver, 1, sender]}"
        )


def mode_of(results: Sequence[Tensor]) -> Callable[[], AbstractContextManager[object]]:
    """Return the mode in which results may be written: those of inference mode in that one only."""
    are_inferred = any(each.is_inference() for each in results)
    return torch.inference_mode if are_inferred else nullcontext


def check_elements(results: Sequence[Tensor]) -> None:
    """Raise ValueError if elements of a result share memory, as those of an expanded tensor do."""
    for tensor in results:
        if not is_dense(tensor) or tensor.is_contiguous():
            continue
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                "expected a result whose elements have memory of their own, got an expanded "
                "tensor; give its .contiguous()"
            )
