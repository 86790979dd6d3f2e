"""All-reduce by MPI messages: run the steps of an algorithm on several chunks at a time, without
spinning."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from paceline.errors import TimedOut
from paceline.plan.message_schedules import (
    ALGORITHMS,
    chunk_length,
    chunks,
    concurrent_chunks,
)
from paceline.transports.base import PeerLost
from paceline.transports.mpi.polling import AdaptivePause
from paceline.transports.mpi.reduce_operations import reduce_in_order

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from paceline.plan.message_schedules import Span, Step
    from paceline.transports.mpi.rank_names import RankNames


@dataclass(slots=True)
class Traffic:
    """Messages and bytes that this rank has sent."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Message:
    request: MPI.Request
    channel: int
    peer: int
    verb: str


class MessageAllReduce:
    """All-reduce by messages among the ranks of a communicator that nothing else uses.

    Chunks of a message are distributed over several channels, which progress independently. Only
    one thread may call it, and all ranks make the same calls in the same order.
    """

    def __init__(self, comm: MPI.Comm, names: RankNames, limit_s: float) -> None:
        """names: names of the ranks of `comm`. limit_s: limit of every all-reduce."""
        self._comm = comm
        self._names = names
        self._rank, self._size = comm.rank, comm.size
        self._limit_s = limit_s
        self._scratch: dict[int, NDArray[np.uint8]] = {}  # receive memory by channel
        self._abandoned: list[Any] = []

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc, algorithm: str) -> Traffic:
        """Reduce a flat array over all ranks in place; all ranks get bit-identical results.

        algorithm: a key of ALGORITHMS. Raises TimedOut or, if MPI fails, PeerLost; both name the
        ranks that have not answered.
        """
        traffic = Traffic()
        spans = chunks(len(buffer), chunk_length(algorithm, self._size, buffer.itemsize))
        count = min(concurrent_chunks(algorithm), len(spans))
        channels = [
            self._channel(buffer, spans[channel::count], channel, ufunc, algorithm, traffic)
            for channel in range(count)
        ]
        pending = [message for channel in channels for message in next(channel, [])]
        deadline = time.monotonic() + self._limit_s
        pause = AdaptivePause()
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
            busy = {message.channel for message in left}
            done = sorted({pending[index].channel for index in ended} - busy)
            pending = left + [message for number in done for message in next(channels[number], [])]
            if pending:
                pause.sleep(len(ended), len(left))
        return traffic

    def _channel(
        self,
        buffer: NDArray[Any],
        spans: list[Span],
        channel: int,
        ufunc: np.ufunc,
        algorithm: str,
        traffic: Traffic,
    ) -> Generator[list[_Message], None, None]:
        """Reduce one chunk after the other. Yields the messages of a step; resumed when all of them
        have ended."""
        for span in spans:
            chunk = buffer[span.slice]
            for step in _steps_of(algorithm, self._rank, self._size, len(chunk)):
                received = self._receive_buffers(step, chunk, channel)
                messages = []
                for receive, target in zip(step.receives, received, strict=True):
                    request = self._comm.Irecv(target.view(np.uint8), receive.peer, channel)
                    messages.append(_Message(request, channel, receive.peer, "receive from"))
                for send in step.sends:
                    part = chunk[send.span.slice]
                    request = self._comm.Isend(part.view(np.uint8), send.peer, channel)
                    messages.append(_Message(request, channel, send.peer, "send to"))
                    traffic.messages += 1
                    traffic.bytes += part.nbytes
                yield messages
                contributions = {
                    receive.peer: target
                    for receive, target in zip(step.receives, received, strict=True)
                    if receive.reduced
                }
                if contributions:
                    own = chunk[step.receives[0].span.slice]
                    reduce_in_order(own, self._rank, contributions, ufunc)

    def _receive_buffers(self, step: Step, chunk: NDArray[Any], channel: int) -> list[NDArray[Any]]:
        """Return where to receive: in place, or in the channel's own memory for what is reduced."""
        needed = sum(len(r.span) for r in step.receives if r.reduced) * chunk.itemsize
        if channel not in self._scratch or len(self._scratch[channel]) < needed:
            self._scratch[channel] = np.empty(needed, np.uint8)
        free = self._scratch[channel][:needed].view(chunk.dtype)
        targets = []
        for receive in step.receives:
            if receive.reduced:
                targets.append(free[: len(receive.span)])
                free = free[len(receive.span) :]
            else:
                targets.append(chunk[receive.span.slice])
        return targets

    def _explained(self, pending: list[_Message], algorithm: str, what: str) -> str:
        missing = sorted({f"{message.verb} {self._names(message.peer)}" for message in pending})
        own = self._names.world_ranks[self._rank]
        return (
            f"rank {own}: MPI allreduce ({algorithm}) {what}: still to {', '.join(missing)}; look "
            "at the other ranks' logs"
        )


@lru_cache(maxsize=256)
def _steps_of(algorithm: str, rank: int, size: int, length: int) -> tuple[Step, ...]:
    return tuple(ALGORITHMS[algorithm](rank, size, length))
