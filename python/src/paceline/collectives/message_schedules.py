"""Collective algorithms: the messages of each rank, for any number of ranks.

Groups of `mpi` carry them out, and a benchmark simulates them (python/benchmarks/simulation.py).
`costs.link_cost` has the formulas of their time. Each function returns the steps of one rank for
`length` elements. The steps of all ranks match: between two ranks, messages are sent and received
in the same order and with the same lengths, empty ones included. At the end all ranks hold
bit-identical results, because each element is reduced in one place, or by every rank from the same
values in the order of the ranks.

Messages and elements sent, with N ranks, P the largest power of two up to N, R = N - P, and n
elements (totals over all ranks; n elements of one chunk, see `chunk_length`):

- ring: 2 N (N-1) messages, 2 (N-1) n elements, 2 (N-1)/N n from each rank, which is the minimum of
  any all-reduce (Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of
  workstations, 2009);
- recursive doubling: P log2 P + 2 R messages of n elements (Thakur, Rabenseifner, Gropp:
  Optimization of Collective Communication Operations in MPICH, 2005, section 4.5);
- Rabenseifner, that is recursive halving and doubling: 2 P log2 P + 2 R messages, 2 (P-1) n + 2 R n
  elements (the same). If N is not a power of two, R ranks send their elements to a neighbour first
  and receive the result last, in both (section 4.1, "first approach");
- naive: N (N-1) messages of n elements, every rank to every other;
- parameter server: 2 (N-1) messages of n elements, through rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

# --- equal shares of a row of elements, for the ranks of a job or of a node ----------------------


def share_bounds(length: int, share: int, shares: int) -> tuple[int, int]:
    """Return the half-open bounds of one of equal shares; the first ones get the remainder."""
    base, extra = divmod(length, shares)
    low = share * base + min(share, extra)
    return low, low + base + (1 if share < extra else 0)


class Span(NamedTuple):
    """Elements from `start` up to `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Send:
    """Send these elements with their values at the beginning of the step."""

    peer: int
    span: Span


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive these elements. At the end of the step, reduce them into this rank's elements or
    replace those."""

    peer: int
    span: Span
    reduced: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Messages in flight at the same time. The next step begins when all of them have ended.

    Contributions of several peers to the same elements are reduced in the order of the ranks, this
    rank included.
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


# Size of one message. Over TCP, Open MPI sends up to 64 KiB including headers eagerly (parameter
# btl_tcp_eager_limit). Longer messages need a handshake, which queues behind megabytes of other
# messages in the socket: at 1 Gbit/s, 25 MB take 265 ms with 256 KiB a message, 211 ms with this.
MESSAGE_BYTES = 60 * 2**10
# The papers send whole gradients. Chunks of this size bound the memory for them.
_WHOLE_BYTES = 64 * 2**20
_WHOLE = frozenset({"naive", "parameter-server"})
_AT_ONCE = 16

Schedule = Callable[[int, int, int], Iterable[Step]]


def ring(rank: int, size: int, length: int) -> Iterator[Step]:
    """Reduce-scatter and all-gather around the ring of the ranks."""
    yield from _around(rank, size, length, first=rank, reduced=True)
    yield from _around(rank, size, length, first=rank + 1, reduced=False)


def all_gather_ring(rank: int, size: int, length: int) -> Iterator[Step]:
    """Pass the parts of all ranks around the ring; part r belongs to rank r at the beginning."""
    return _around(rank, size, length, first=rank, reduced=False)


def recursive_doubling(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Exchange everything with a partner at distance 1, 2, 4, …"""
    whole = Span(0, length)

    def among(position: int, ranks: list[int]) -> list[Step]:
        return [
            _exchange(ranks[position ^ distance], whole, whole, reduced=True)
            for distance in _powers_below(len(ranks))
        ]

    return _for_any_rank_count(rank, size, whole, among)


def rabenseifner(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Halve the own range with each partner, then gather the ranges in reverse order.

    The nearest partner comes first: most data is exchanged with it, and it may be on the same host.
    """
    whole = Span(0, length)

    def among(position: int, ranks: list[int]) -> list[Step]:
        halving, doubling, own = [], [], whole
        for distance in _powers_below(len(ranks)):
            middle = own.start + len(own) // 2
            halves = Span(own.start, middle), Span(middle, own.stop)
            upper = bool(position & distance)
            own, other = halves[upper], halves[not upper]
            partner = ranks[position ^ distance]
            halving.append(_exchange(partner, other, own, reduced=True))
            doubling.append(_exchange(partner, own, other, reduced=False))
        return [*halving, *reversed(doubling)]

    return _for_any_rank_count(rank, size, whole, among)


def naive(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Send everything to every other rank; every rank reduces for itself."""
    whole = Span(0, length)
    peers = [peer for peer in range(size) if peer != rank]
    sends = tuple(Send(peer, whole) for peer in peers)
    return (Step(sends, tuple(Receive(peer, whole, reduced=True) for peer in peers)),)


def parameter_server(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Send everything to rank 0, which reduces it and sends it back."""
    whole = Span(0, length)
    if rank != 0:
        return (
            Step(sends=(Send(0, whole),)),
            Step(receives=(Receive(0, whole, reduced=False),)),
        )
    workers = range(1, size)
    return (
        Step(receives=tuple(Receive(worker, whole, reduced=True) for worker in workers)),
        Step(sends=tuple(Send(worker, whole) for worker in workers)),
    )


# How an all-reduce is requested of MPI, where ranks cannot share the memory of one node.
Algorithm = Literal[
    "auto",
    "native",  # MPI's own
    "ring",
    "recursive-doubling",
    "rabenseifner",
    "hierarchical",
    "naive",
    "parameter-server",
]


ALGORITHMS: Final = MappingProxyType[str, Schedule](
    {
        "ring": ring,
        "recursive-doubling": recursive_doubling,
        "rabenseifner": rabenseifner,
        "naive": naive,
        "parameter-server": parameter_server,
    }
)


def chunk_length(algorithm: str, size: int, item_bytes: int) -> int:
    """Return the elements of one chunk. Longer messages are reduced in several chunks at a time, so
    that one is in transit while another is reduced, and both directions of the link are busy."""
    if algorithm in _WHOLE:
        return _WHOLE_BYTES // item_bytes
    messages = {"ring": size, "rabenseifner": 2}.get(algorithm, 1)
    return messages * MESSAGE_BYTES // item_bytes


def concurrent_chunks(algorithm: str) -> int:
    """Return the number of chunks in flight.

    Sixteen are one megabyte, 8 ms at 1 Gbit/s: as long as a busy core may keep this rank from
    polling (25 MB take 211 ms with 16 or 32 chunks, 229 ms with 8).
    """
    return 1 if algorithm in _WHOLE else _AT_ONCE


def chunks(length: int, longest: int) -> list[Span]:
    """Split `length` elements into consecutive chunks of about equal length; none for no
    elements."""
    count = -(-length // longest)
    return [Span(*share_bounds(length, chunk, count)) for chunk in range(count)]


def _around(rank: int, size: int, length: int, *, first: int, reduced: bool) -> Iterator[Step]:
    """Send part `first` to the following rank, then each part that came from the preceding one."""
    following, preceding = (rank + 1) % size, (rank - 1) % size

    def part(number: int) -> Span:
        return Span(*share_bounds(length, number % size, size))

    for sent in range(first, first - size + 1, -1):
        yield Step(
            (Send(following, part(sent)),),
            (Receive(preceding, part(sent - 1), reduced),),
        )


def _exchange(peer: int, sent: Span, received: Span, *, reduced: bool) -> Step:
    return Step((Send(peer, sent),), (Receive(peer, received, reduced),))


def _powers_below(size: int) -> list[int]:
    return [2**power for power in range((size - 1).bit_length())]


def _for_any_rank_count(
    rank: int, size: int, whole: Span, among: Callable[[int, list[int]], list[Step]]
) -> tuple[Step, ...]:
    """Return the steps of an algorithm for powers of two, `among(position, ranks)`, for any number
    of ranks.

    Of the first 2 R ranks, the odd ones also represent the even ones.
    """
    power = 2 ** (size.bit_length() - 1)
    rest = size - power
    ranks = [*range(1, 2 * rest, 2), *range(2 * rest, size)]
    if rank not in ranks:
        representative = rank + 1
        return (
            Step(sends=(Send(representative, whole),)),
            Step(receives=(Receive(representative, whole, reduced=False),)),
        )
    steps = among(ranks.index(rank), ranks)
    if rank < 2 * rest:
        steps.insert(0, Step(receives=(Receive(rank - 1, whole, reduced=True),)))
        steps.append(Step(sends=(Send(rank - 1, whole),)))
    return tuple(steps)


def between_hosts(hosts: int) -> str:
    """Return the algorithm by which hosts exchange long messages in a hierarchical all-reduce.

    It sends the least: for two hosts recursive doubling sends as little as a ring, in one step.
    """
    return "recursive-doubling" if hosts == 2 else "ring"
