"""Agreement of ranks on what they call, without which a sum would be of different things.

Each rank writes number and description of its call into shared memory before the first barrier of
the call, and compares all ranks' after it. So it costs no barrier of its own, except in calls that
have none. A rank can be at most one call ahead of a peer that compares: two records suffice.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

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
    """What this rank and the others of a host call; one thread at a time uses it."""

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
