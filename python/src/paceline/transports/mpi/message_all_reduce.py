"""All-reduce by MPI messages: run the steps of an algorithm on several chunks at a time, without
spinning."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.costs.message_schedules import (
    ALGORITHMS,
    chunk_length,
    chunks,
    concurrent_chunks,
)
from paceline.transports.mpi.message_channels import MessageChannels, Traffic
from paceline.transports.mpi.reduce_operations import reduce_in_order

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

    from paceline.costs.message_schedules import Span, Step
    from paceline.transports.mpi.message_channels import Channel
    from paceline.transports.mpi.rank_names import RankNames


class MessageAllReduce:
    """All-reduce by messages among the ranks of a communicator that nothing else uses.

    Chunks of a message are distributed over several channels, which progress independently. Only
    one thread may call it, and all ranks make the same calls in the same order.
    """

    def __init__(self, comm: MPI.Comm, names: RankNames, limit_s: float) -> None:
        """names: names of the ranks of `comm`. limit_s: limit of every all-reduce."""
        self._messages = MessageChannels(comm, names, limit_s)
        self._rank, self._size = comm.rank, comm.size
        self._scratch: dict[int, NDArray[np.uint8]] = {}  # receive memory by channel

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
        self._messages.run(channels, f"allreduce ({algorithm})", buffer, self._scratch)
        return traffic

    def _channel(
        self,
        buffer: NDArray[Any],
        spans: list[Span],
        channel: int,
        ufunc: np.ufunc,
        algorithm: str,
        traffic: Traffic,
    ) -> Channel:
        """Reduce one chunk after the other."""
        for span in spans:
            chunk = buffer[span.slice]
            for step in _steps_of(algorithm, self._rank, self._size, len(chunk)):
                received = self._receive_buffers(step, chunk, channel)
                messages = []
                for receive, target in zip(step.receives, received, strict=True):
                    target_bytes = target.view(np.uint8)
                    messages.append(self._messages.receive(target_bytes, receive.peer, channel))
                for send in step.sends:
                    part = chunk[send.span.slice].view(np.uint8)
                    messages.append(self._messages.send(part, send.peer, channel, traffic))
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


@lru_cache(maxsize=256)
def _steps_of(algorithm: str, rank: int, size: int, length: int) -> tuple[Step, ...]:
    return tuple(ALGORITHMS[algorithm](rank, size, length))
