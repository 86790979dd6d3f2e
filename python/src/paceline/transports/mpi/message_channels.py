"""Channels: several sequences of messages that progress independently, without spinning."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mpi4py import MPI

from paceline.errors import PeerLost, TimedOut
from paceline.transports.mpi.polling import AdaptivePause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.transports.mpi.rank_names import RankNames


@dataclass(slots=True)
class Traffic:
    """Messages and bytes that this rank has sent."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Message:
    """One message in flight."""

    request: MPI.Request
    channel: int
    peer: int
    verb: Literal["receive from", "send to"]


# Yields the messages of a step; resumed when all of them have ended.
Channel = Generator[list[Message], None, None]


class MessageChannels:
    """Starts and completes the messages of a communicator for one operation after the other.

    Only one thread may use it, and all ranks run the same operations in the same order.
    """

    def __init__(self, comm: MPI.Comm, names: RankNames, limit_s: float) -> None:
        """names: names of the ranks of `comm`. limit_s: limit of every operation."""
        self._comm = comm
        self._names = names
        self._limit_s = limit_s
        self._abandoned: list[Any] = []

    def receive(self, target: NDArray[Any], peer: int, channel: int) -> Message:
        """Start to receive an array of bytes."""
        request = self._comm.Irecv(target, peer, channel)
        return Message(request, channel, peer, "receive from")

    def send(self, part: NDArray[Any], peer: int, channel: int, traffic: Traffic) -> Message:
        """Start to send an array of bytes, and count it."""
        traffic.messages += 1
        traffic.bytes += part.nbytes
        return Message(self._comm.Isend(part, peer, channel), channel, peer, "send to")

    def run(self, channels: Sequence[Channel], operation: str, *memory: object) -> None:
        """Run all channels to their ends. The number of a channel is its index.

        operation: its name for messages. memory: what MPI writes to; kept if it may still do so
        later. Raises TimedOut or, if MPI fails, PeerLost; both name the ranks that have not
        answered.
        """
        pending = [message for channel in channels for message in next(channel, [])]
        deadline = time.monotonic() + self._limit_s
        pause = AdaptivePause()
        while pending:
            try:
                ended = set(MPI.Request.Testsome([message.request for message in pending]) or ())
            except MPI.Exception as error:
                raise PeerLost(self._explained(pending, operation, f"failed: {error}")) from error
            if not ended and time.monotonic() > deadline:
                self._abandoned += [pending, memory]
                late = f"did not end within {self._limit_s:g} s (limits.collective_s)"
                raise TimedOut(self._explained(pending, operation, late))
            left = [message for index, message in enumerate(pending) if index not in ended]
            busy = {message.channel for message in left}
            done = sorted({pending[index].channel for index in ended} - busy)
            pending = left + [message for number in done for message in next(channels[number], [])]
            if pending:
                pause.sleep(len(ended), len(left))

    def _explained(self, pending: list[Message], operation: str, what: str) -> str:
        missing = sorted({f"{message.verb} {self._names(message.peer)}" for message in pending})
        own = self._names.world_ranks[self._comm.rank]
        return (
            f"rank {own}: MPI {operation} {what}: still to {', '.join(missing)}; look at the other "
            "ranks' logs"
        )
