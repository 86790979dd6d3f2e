"""Collectives by MPI messages: run the steps of a schedule on several chunks at a time, without
spinning.

MPI's own all-gather sends each part as one message. Over TCP, the handshakes of such messages wait
for the data of the other direction: between two hosts at 100 Mbit/s, 4 MB of each take 0.66 s, and
0.34 s in messages of 60 KiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from paceline.collectives.agreement import TEXT_BYTES, calls_differ
from paceline.collectives.buffers import reduce_in_order
from paceline.collectives.errors import CallsDiffer, PeerLost, TimedOut
from paceline.collectives.message_schedules import (
    ALGORITHMS,
    MESSAGE_BYTES,
    Span,
    Step,
    all_gather_ring,
    between_hosts,
    chunk_length,
    chunks,
    concurrent_chunks,
)
from paceline.collectives.mpi.world import AdaptivePause, RankNames
from paceline.collectives.shared_memory import HostGroup, Leaders

_SHORT_BYTES = 64 * 2**10  # between hosts


class MessageCollectives:
    """All-reduce and all-gather by messages among the ranks of a communicator that nothing else
    uses.

    Chunks of a message are distributed over several channels, which progress independently. Only
    one thread may call it, and all ranks make the same calls in the same order. Errors are TimedOut
    or, if MPI fails, PeerLost; both name the ranks that have not answered.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        names: RankNames,
        limit_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """names: names of the ranks of `comm`. limit_s: limit of every operation.

        check: called while messages are under way; an error that it raises gives them up.
        """
        self._check = check
        self._comm, self._names, self._limit_s = comm, names, limit_s
        self._rank, self._size = comm.rank, comm.size
        self._scratch: dict[int, NDArray[np.uint8]] = {}  # receive memory by channel
        self._abandoned: list[Any] = []  # MPI may still write there

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc, algorithm: str) -> Traffic:
        """Reduce a flat array over all ranks in place; all ranks get bit-identical results.

        algorithm: a key of ALGORITHMS.
        """
        traffic = Traffic()
        spans = chunks(len(buffer), chunk_length(algorithm, self._size, buffer.itemsize))

        def channel_of(spans: Sequence[Span], channel: int) -> Channel:
            for span in spans:
                yield from self._reduce_chunk(
                    buffer[span.slice], channel, ufunc, algorithm, traffic
                )

        self._run(spans, algorithm, channel_of, f"allreduce ({algorithm})", buffer)
        return traffic

    def all_gather(self, everyone: NDArray[np.uint8], own: NDArray[np.uint8]) -> Traffic:
        """Copy every rank's bytes, of equal number, consecutively into `everyone`."""
        traffic = Traffic()
        parts = everyone.reshape(self._size, len(own))
        parts[self._rank] = own
        spans = chunks(len(own), MESSAGE_BYTES)
        steps = tuple(all_gather_ring(self._rank, self._size, self._size))

        def channel_of(spans: Sequence[Span], channel: int) -> Channel:
            for span in spans:
                for step in steps:
                    targets = [parts[r.span.start, span.slice] for r in step.receives]
                    sent = [parts[s.span.start, span.slice] for s in step.sends]
                    yield self._start(step, targets, sent, channel, traffic)

        self._run(spans, "ring", channel_of, "allgather", everyone)
        return traffic

    def _run(
        self,
        spans: Sequence[Span],
        algorithm: str,
        channel_of: Callable[[Sequence[Span], int], Channel],
        operation: str,
        memory: NDArray[Any],
    ) -> None:
        """Distribute the chunks over channels, and run these to their ends.

        operation: its name for messages. memory: what MPI writes to, beside the scratch memory;
        both are kept if it may still do so later.
        """
        count = min(concurrent_chunks(algorithm), len(spans))
        channels = [channel_of(spans[channel::count], channel) for channel in range(count)]
        pending = [message for channel in channels for message in next(channel, [])]
        deadline = time.monotonic() + self._limit_s
        pause = AdaptivePause()
        while pending:
            try:
                self._check()
                ended = set(MPI.Request.Testsome([message.request for message in pending]) or ())
            except CallsDiffer:
                self._abandoned += [pending, memory, self._scratch]
                raise
            except MPI.Exception as error:
                raise PeerLost(self._explained(pending, operation, f"failed: {error}")) from error
            if not ended and time.monotonic() > deadline:
                self._abandoned += [pending, memory, self._scratch]
                late = f"did not end within {self._limit_s:g} s (limits.collective_s)"
                raise TimedOut(self._explained(pending, operation, late))
            left = [message for index, message in enumerate(pending) if index not in ended]
            busy = {message.channel for message in left}
            done = sorted({pending[index].channel for index in ended} - busy)
            pending = left + [message for number in done for message in next(channels[number], [])]
            if pending:
                pause.sleep(len(ended), len(left))

    def _start(
        self,
        step: Step,
        targets: Sequence[NDArray[Any]],
        sent: Sequence[NDArray[Any]],
        channel: int,
        traffic: Traffic,
    ) -> list[MessageInFlight]:
        """Start the messages of a step. targets, sent: their bytes, in the order of the step."""
        messages = []
        for receive, target in zip(step.receives, targets, strict=True):
            request = self._comm.Irecv(target, receive.peer, channel)
            messages.append(MessageInFlight(request, channel, receive.peer, "receive from"))
        for send, part in zip(step.sends, sent, strict=True):
            traffic.messages += 1
            traffic.bytes += part.nbytes
            request = self._comm.Isend(part, send.peer, channel)
            messages.append(MessageInFlight(request, channel, send.peer, "send to"))
        return messages

    def _reduce_chunk(
        self,
        chunk: NDArray[Any],
        channel: int,
        ufunc: np.ufunc,
        algorithm: str,
        traffic: Traffic,
    ) -> Channel:
        for step in _steps_of(algorithm, self._rank, self._size, len(chunk)):
            received = self._receive_buffers(step, chunk, channel)
            sent = [chunk[send.span.slice].view(np.uint8) for send in step.sends]
            targets = [target.view(np.uint8) for target in received]
            yield self._start(step, targets, sent, channel, traffic)
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

    def _explained(self, pending: list[MessageInFlight], operation: str, what: str) -> str:
        missing = sorted({f"{message.verb} {self._names(message.peer)}" for message in pending})
        own = self._names.world_ranks[self._rank]
        return (
            f"rank {own}: MPI {operation} {what}: still to {', '.join(missing)}; look at the other "
            "ranks' logs"
        )


class Hierarchy:
    """All-reduce among ranks on several hosts, each with one or more ranks.

    The leaders of hosts exchange messages: in a ring, which sends the least, or, what is the same
    between two hosts, by recursive doubling.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        hosts: Sequence[int],
        group: HostGroup | None,
        limit_s: float,
        check: Callable[[], None],
    ) -> None:
        """Construct; collective. hosts: for each rank a number that is the same for all ranks of a
        host. group: ranks of this host; None for a single rank. check: see MessageCollectives."""
        self._leaders = leaders = Leaders(hosts, comm.rank)
        self._group = group
        self._hosts = len(set(hosts))
        color = leaders.local_rank if leaders.include_this_rank else MPI.UNDEFINED
        self._leader_comm = comm.Split(color, comm.rank)
        self._messages: MessageCollectives | None = None
        if leaders.include_this_rank:
            names = RankNames.gather(self._leader_comm, limit_s)
            self._messages = MessageCollectives(self._leader_comm, names, limit_s, check)

    def allreduce(self, buffer: NDArray[Any], ufunc: np.ufunc) -> Traffic:
        """Reduce a flat array over all ranks in place; all ranks get bit-identical results.

        Return the traffic that this rank sent to other hosts.
        """
        sent = self._leaders.allreduce(buffer, ufunc, self._group, self._exchange)
        return sent or Traffic()

    def _exchange(self, part: NDArray[Any], ufunc: np.ufunc) -> Traffic:
        assert self._messages is not None, "this rank is a leader"
        is_short = part.nbytes <= _SHORT_BYTES
        algorithm = "recursive-doubling" if is_short else between_hosts(self._hosts)
        return self._messages.allreduce(part, ufunc, algorithm)

    def close(self) -> None:
        """Free the communicator; collective."""
        if self._messages is not None:
            self._leader_comm.Free()


class Meeting:
    """Exchange of what the ranks of a communicator call, under way beside their messages."""

    def __init__(self, comm: MPI.Intracomm, call: str, names: RankNames) -> None:
        """Begin; collective. call: of this rank, in words."""
        self._names = names
        self._own = np.zeros(TEXT_BYTES, np.uint8)
        text = np.frombuffer(call.encode()[:TEXT_BYTES], np.uint8)
        self._own[: len(text)] = text
        self._calls = np.zeros((comm.size, TEXT_BYTES), np.uint8)
        self.request = comm.Iallgather(self._own, self._calls)

    def compare(self, reason: Exception | None) -> None:
        """Raise CallsDiffer if the calls differ; the exchange has ended. reason: what made known
        that they may."""
        if (self._calls != self._own).any():
            texts = [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in self._calls]
            names = [f"rank {rank}" for rank in self._names.world_ranks]
            raise calls_differ(dict(zip(names, texts, strict=True))) from reason


@lru_cache(maxsize=256)
def _steps_of(algorithm: str, rank: int, size: int, length: int) -> tuple[Step, ...]:
    return tuple(ALGORITHMS[algorithm](rank, size, length))


@dataclass(slots=True)
class Traffic:
    """Messages and bytes that this rank has sent."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class MessageInFlight:
    """One message in flight."""

    request: MPI.Request
    channel: int
    peer: int
    verb: Literal["receive from", "send to"]


# Yields the messages of a step; resumed when all of them have ended.
Channel = Generator[list[MessageInFlight], None, None]
