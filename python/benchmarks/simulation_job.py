"""One simulation, as the values that its process reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from paceline.collectives.message_schedules import ALGORITHMS, all_gather_ring, ring
from paceline.plan.costs import all_gather, all_reduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.collectives.message_schedules import Schedule
    from paceline.plan.costs import CollectiveCost

ALL_GATHER = "allgather"
SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {**ALGORITHMS, ALL_GATHER: all_gather_ring}
)
# Rounds after which a ring with some longer links has its final pace, and as many to measure it.
_SETTLING_ROUNDS = 24
# Algorithms of which all rounds have messages of one length between the same neighbours.
_HAVE_EQUAL_ROUNDS: Final = frozenset({ring, all_gather_ring})


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Switches between the hosts.

    rack_hosts: None means that one switch connects all hosts. Otherwise a switch connects the hosts
    of a rack, which have consecutive ranks, and another one connects the racks.
    oversubscription: bandwidth of all links of a full rack over that of its uplink.
    """

    rack_hosts: int | None = None
    oversubscription: float = 1.0

    def of_ranks(self, ranks_per_host: int) -> Topology:
        """Return the topology in which each rank has a host of its own, for the same racks."""
        hosts = None if self.rack_hosts is None else self.rack_hosts * ranks_per_host
        return replace(self, rack_hosts=hosts)

    def __str__(self) -> str:
        if self.rack_hosts is None:
            return "one switch"
        ratio = f"oversubscribed {self.oversubscription:g}:1"
        return f"racks of {self.rack_hosts} hosts, uplinks {ratio}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One collective operation of ranks that are alone on their hosts.

    algorithm: a key of SCHEDULES. payload_bytes: of one rank's tensor. latency_s: between two hosts
    of a switch. bytes_per_s: of a host's link in each direction. in_chunks: split the payload as
    the transport `mpi` does; otherwise a message carries its whole part.
    """

    algorithm: str
    ranks: int
    payload_bytes: int
    latency_s: float
    bytes_per_s: float
    topology: Topology = Topology()
    in_chunks: bool = False

    @property
    def cost(self) -> CollectiveCost:
        """Messages and volumes by formula, without contention."""
        if self.algorithm == ALL_GATHER:
            return all_gather(self.ranks)
        return all_reduce(self.algorithm, self.ranks)

    @property
    def formula_s(self) -> float:
        """Time by formula, without contention."""
        return self.cost.seconds(self.payload_bytes, self.latency_s, self.bytes_per_s)

    @property
    def length(self) -> int:
        """Bytes that the schedule divides."""
        return self.payload_bytes * (self.ranks if self.algorithm == ALL_GATHER else 1)

    @property
    def simulated_rounds(self) -> tuple[int, int] | None:
        """Numbers of rounds to simulate where all rounds are equal; None: all of them."""
        if self.in_chunks or SCHEDULES[self.algorithm] not in _HAVE_EQUAL_ROUNDS:
            return None
        if self.cost.rounds <= 2 * _SETTLING_ROUNDS:
            return None
        return _SETTLING_ROUNDS, 2 * _SETTLING_ROUNDS

    @property
    def simulated_messages(self) -> int:
        """Messages to simulate without chunks, which determine the time that a simulation takes."""
        rounds = self.simulated_rounds
        return self.cost.messages if rounds is None else rounds[1] * self.ranks
