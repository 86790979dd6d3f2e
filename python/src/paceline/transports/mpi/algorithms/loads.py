"""How much of a long message each algorithm sends through the link of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.transports.mpi.algorithms.schedules import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Sequence

_ELEMENTS_PER_RANK = 1024


def between_hosts(hosts: int) -> str:
    """By what the hosts of a hierarchy exchange long messages.

    What sends the least: for two hosts recursive doubling sends as little as a ring, at once.
    """
    return "recursive-doubling" if hosts == 2 else "ring"


def link_load(algorithm: str, hosts: Sequence[int]) -> float:
    """Bytes that leave or enter the busiest host, whichever is more, for each byte of the message.

    hosts: of each rank, the lowest rank of its host. The first two hosts are as busy as any: there
    are ranks that stand in for others if they are no power of two.
    """
    if algorithm == "hierarchical":
        count = len(set(hosts))
        return link_load(between_hosts(count), range(count))
    size = len(hosts)
    length = size * _ELEMENTS_PER_RANK
    busiest = 0
    for host in sorted(set(hosts))[:2]:
        sent = received = 0
        for rank in (rank for rank in range(size) if hosts[rank] == host):
            for step in SCHEDULES[algorithm](rank, size, length):
                sent += sum(len(s.span) for s in step.sends if hosts[s.peer] != host)
                received += sum(len(r.span) for r in step.receives if hosts[r.peer] != host)
        busiest = max(busiest, sent, received)
    return busiest / length
