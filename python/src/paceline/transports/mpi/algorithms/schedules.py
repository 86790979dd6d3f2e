"""Who sends what to whom in each all-reduce algorithm, for any number of ranks.

Each function gives one rank's steps for `length` elements; those of all ranks fit together: between
two ranks messages are sent and received in the same order and with the same lengths, empty ones
included. At the end all ranks hold the very same bits, because each element is reduced in one
place, or by every rank from the same values in the order of the ranks.

Messages and elements sent, with N ranks, P the largest power of two up to N, R = N - P, and n
elements (totals over all ranks; n elements of one piece, see `piece_length`):

- ring: 2 N (N-1) messages, 2 (N-1) n elements, 2 (N-1)/N n from each rank, which is the least that
  any all-reduce can do (Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of
  workstations, 2009);
- recursive doubling: P log2 P + 2 R messages of n elements (Thakur, Rabenseifner, Gropp:
  Optimization of Collective Communication Operations in MPICH, 2005, section 4.5);
- Rabenseifner, that is recursive halving and doubling: 2 P log2 P + 2 R messages,
  2 (P-1) n + 2 R n elements (the same). Of ranks that are no power of two, R give their elements to
  a neighbour first and get the result last, in both (there: section 4.1, "first approach");
- naive: N (N-1) messages of n elements, every rank to every other;
- parameter server: 2 (N-1) messages of n elements, through rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from paceline.plan.schedule import share_bounds
from paceline.transports.mpi.algorithms.steps import Receive, Send, Span, Step

# Of one message. Open MPI sends up to 64 KiB with its headers over TCP at once (its parameter
# btl_tcp_eager_limit). Longer ones shake hands first, and the hand shakes queue behind megabytes
# of other messages in the socket: at 1 Gbit/s, 25 MB take 265 ms with 256 KiB a message, 211 with
# this.
MESSAGE_BYTES = 60 * 2**10
# The papers send whole gradients; in pieces as long as this, memory for them stays bounded.
_WHOLE_BYTES = 64 * 2**20
_WHOLE = frozenset({"naive", "parameter-server"})
_AT_ONCE = 16

Schedule = Callable[[int, int, int], tuple[Step, ...]]


def ring(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Reduce-scatter and all-gather around the ring of the ranks."""
    parts = [Span(*share_bounds(length, part, size)) for part in range(size)]
    following, preceding = (rank + 1) % size, (rank - 1) % size

    def step(part: int, *, reduced: bool) -> Step:
        return Step(
            (Send(following, parts[part % size]),),
            (Receive(preceding, parts[(part - 1) % size], reduced),),
        )

    scatter = [step(rank - turn, reduced=True) for turn in range(size - 1)]
    gather = [step(rank + 1 - turn, reduced=False) for turn in range(size - 1)]
    return (*scatter, *gather)


def recursive_doubling(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Exchange everything with a partner at distance 1, 2, 4, …"""
    whole = Span(0, length)

    def among(position: int, ranks: list[int]) -> list[Step]:
        return [
            _exchange(ranks[position ^ distance], whole, whole, reduced=True)
            for distance in _powers_below(len(ranks))
        ]

    return _folded(rank, size, whole, among)


def rabenseifner(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Halve what one is responsible for with each partner, then put it together again.

    The nearest partner first, with whom most is exchanged: it may be on the same host.
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

    return _folded(rank, size, whole, among)


def naive(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Every rank sends everything to every other, and reduces for itself."""
    whole = Span(0, length)
    peers = [peer for peer in range(size) if peer != rank]
    sends = tuple(Send(peer, whole) for peer in peers)
    return (Step(sends, tuple(Receive(peer, whole, reduced=True) for peer in peers)),)


def parameter_server(rank: int, size: int, length: int) -> tuple[Step, ...]:
    """Everything to rank 0, which reduces, and back."""
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


SCHEDULES: Final = MappingProxyType[str, Schedule](
    {
        "ring": ring,
        "recursive-doubling": recursive_doubling,
        "rabenseifner": rabenseifner,
        "naive": naive,
        "parameter-server": parameter_server,
    }
)


def piece_length(algorithm: str, size: int, item_bytes: int) -> int:
    """Elements of one piece. A message longer than that is reduced piece by piece, several at a
    time, so that one is on the wire while another is reduced, and both ways are busy."""
    if algorithm in _WHOLE:
        return _WHOLE_BYTES // item_bytes
    messages = {"ring": size, "rabenseifner": 2}.get(algorithm, 1)
    return messages * MESSAGE_BYTES // item_bytes


def pieces_at_once(algorithm: str) -> int:
    """How many are under way: while one is reduced or waits, others are on the wire.

    Sixteen are a megabyte, 8 ms at 1 Gbit/s: as long as a busy core may keep this rank from looking
    (25 MB take 211 ms there with 16 or 32 pieces, 229 with 8).
    """
    return 1 if algorithm in _WHOLE else _AT_ONCE


def pieces(length: int, longest: int) -> list[Span]:
    """Consecutive pieces of `length` elements, about equally long; of none none."""
    count = -(-length // longest)
    return [Span(*share_bounds(length, piece, count)) for piece in range(count)]


def _exchange(peer: int, sent: Span, received: Span, *, reduced: bool) -> Step:
    return Step((Send(peer, sent),), (Receive(peer, received, reduced),))


def _powers_below(size: int) -> list[int]:
    return [2**power for power in range((size - 1).bit_length())]


def _folded(
    rank: int, size: int, whole: Span, among: Callable[[int, list[int]], list[Step]]
) -> tuple[Step, ...]:
    """Steps of an algorithm for powers of two, `among(position, ranks)`, for any number of ranks.

    Of the first 2 R ranks, the even ones leave it to the odd ones.
    """
    power = 2 ** (size.bit_length() - 1)
    rest = size - power
    ranks = [*range(1, 2 * rest, 2), *range(2 * rest, size)]
    if rank not in ranks:
        keeper = rank + 1
        return (
            Step(sends=(Send(keeper, whole),)),
            Step(receives=(Receive(keeper, whole, reduced=False),)),
        )
    steps = among(ranks.index(rank), ranks)
    if rank < 2 * rest:
        steps.insert(0, Step(receives=(Receive(rank - 1, whole, reduced=True),)))
        steps.append(Step(sends=(Send(rank - 1, whole),)))
    return tuple(steps)
