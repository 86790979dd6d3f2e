"""Carries out the schedules over MPI: pieces under way at the same time, none of them spinning."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from paceline.errors import TimedOut
from paceline.transports.base import PeerLost
from paceline.transports.mpi.algorithms.arithmetic import reduce_in_order
from paceline.transports.mpi.algorithms.schedules import (
    SCHEDULES,
    piece_length,
    pieces,
    pieces_at_once,
)
from paceline.transports.mpi.algorithms.waiting import Patience

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from paceline.transports.mpi.algorithms.steps import Span, Step
    from paceline.transports.mpi.names import Names


@dataclass(slots=True)
class Traffic:
    """What this rank has sent."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Message:
    request: MPI.Request
    lane: int
    peer: int
    verb: str


class Exchange:
    """All-reduce by messages among the ranks of a communicator that nothing else uses.

    For one thread; all ranks call the same in the same order.
    """

    def __init__(self, comm: MPI.Comm, names: Names, limit_s: float) -> None:
        """names: of the ranks of `comm`; limit_s: of every all-reduce."""
        self._comm = comm
        self._names = names
        self._rank, self._size = comm.rank, comm.size
        self._limit_s = limit_s
        self._scratch: dict[int, NDArray[np.uint8]] = {}  # by lane
        self._abandoned: list[Any] = []

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc, algorithm: str) -> Traffic:
        """Reduce a flat array over all ranks, in place; all ranks get the very same bits.

        algorithm: of SCHEDULES. Raises TimedOut or, if MPI fails, PeerLost; both name the ranks
        that are waited for.
        """
        traffic = Traffic()
        spans = pieces(len(buffer), piece_length(algorithm, self._size, buffer.itemsize))
        count = min(pieces_at_once(algorithm), len(spans))
        lanes = [
            self._lane(buffer, spans[lane::count], lane, ufunc, algorithm, traffic)
            for lane in range(count)
        ]
        pending = [message for lane in lanes for message in next(lane, [])]
        deadline = time.monotonic() + self._limit_s
        patience = Patience()
        while pending:
            try:
                ended = set(MPI.Request.Testsome([message.request for message in pending]) or ())
            except MPI.Exception as error:
                raise PeerLost(self._explained(pending, algorithm, f"failed: {error}")) from error
            if not ended and time.monotonic() > deadline:
                self._abandoned += [pending, buffer, self._scratch]  # MPI may still write to them
                late = f"did not end within {self._limit_s:g} s (limits.collective_s)"
                raise TimedOut(self._explained(pending, algorithm, late))
            left = [message for index, message in enumerate(pending) if index not in ended]
            done = {pending[index].lane for index in ended} - {message.lane for message in left}
            pending = left + [message for lane in sorted(done) for message in next(lanes[lane], [])]
            if pending:
                patience.pause(len(ended), len(left))
        return traffic

    def _lane(
        self,
        buffer: NDArray[Any],
        spans: list[Span],
        lane: int,
        ufunc: np.ufunc,
        algorithm: str,
        traffic: Traffic,
    ) -> Generator[list[_Message], None, None]:
        """One piece after the other; yields the messages of a step, resumed when all have ended."""
        for span in spans:
            piece = buffer[span.slice]
            for step in _schedule(algorithm, self._rank, self._size, len(piece)):
                received = self._targets(step, piece, lane)
                messages = []
                for receive, target in zip(step.receives, received, strict=True):
                    request = self._comm.Irecv(target.view(np.uint8), receive.peer, lane)
                    messages.append(_Message(request, lane, receive.peer, "receive from"))
                for send in step.sends:
                    part = piece[send.span.slice]
                    request = self._comm.Isend(part.view(np.uint8), send.peer, lane)
                    messages.append(_Message(request, lane, send.peer, "send to"))
                    traffic.messages += 1
                    traffic.bytes += part.nbytes
                yield messages
                contributions = {
                    receive.peer: target
                    for receive, target in zip(step.receives, received, strict=True)
                    if receive.reduced
                }
                if contributions:
                    own = piece[step.receives[0].span.slice]
                    reduce_in_order(own, self._rank, contributions, ufunc)

    def _targets(self, step: Step, piece: NDArray[Any], lane: int) -> list[NDArray[Any]]:
        """Where to receive: in place, or what is reduced into the lane's own memory."""
        needed = sum(len(r.span) for r in step.receives if r.reduced) * piece.itemsize
        if lane not in self._scratch or len(self._scratch[lane]) < needed:
            self._scratch[lane] = np.empty(needed, np.uint8)
        free = self._scratch[lane][:needed].view(piece.dtype)
        targets = []
        for receive in step.receives:
            if receive.reduced:
                targets.append(free[: len(receive.span)])
                free = free[len(receive.span) :]
            else:
                targets.append(piece[receive.span.slice])
        return targets

    def _explained(self, pending: list[_Message], algorithm: str, what: str) -> str:
        waits = sorted({f"{message.verb} {self._names(message.peer)}" for message in pending})
        own = self._names.world_ranks[self._rank]
        return (
            f"rank {own}: MPI allreduce ({algorithm}) {what}: still to {', '.join(waits)}; look at "
            "the other ranks' logs"
        )


@lru_cache(maxsize=256)
def _schedule(algorithm: str, rank: int, size: int, length: int) -> tuple[Step, ...]:
    return SCHEDULES[algorithm](rank, size, length)
