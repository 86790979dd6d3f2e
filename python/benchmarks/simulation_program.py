"""Process of one simulation: reads a Simulation as JSON, prints the simulated seconds as JSON.

SimGrid allows one simulation per process. Each rank is an actor that sends and receives the
messages of `collectives.message_schedules` as the transports do: a step begins when all messages of
the previous one have ended, and several chunks are in flight. Links share their bandwidth fairly
(SimGrid's model CM02); latency and bandwidth are those that a user sees, so SimGrid's corrections
for TCP are off.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from itertools import islice
from typing import TYPE_CHECKING, Any

from paceline.collectives.message_schedules import Span, chunk_length, chunks, concurrent_chunks
from simulation_job import SCHEDULES, Simulation, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.collectives.message_schedules import Step

DEBIAN_PACKAGES = "/usr/lib/python3/dist-packages"
_STACK_BYTES = 256 * 1024  # of an actor, which is a thread
_CONFIGURATION = (
    "--cfg=network/model:CM02",
    "--cfg=network/crosstraffic:0",
    "--cfg=network/TCP-gamma:0",
    "--log=root.thres:warning",
)


def import_simgrid() -> Any:
    """Import SimGrid, also where Debian installs it. Raises ImportError."""
    if DEBIAN_PACKAGES not in sys.path:
        sys.path.append(DEBIAN_PACKAGES)  # last: everything else comes from our own packages
    import simgrid  # noqa: PLC0415  (found only now)

    return simgrid


def simulate(job: Simulation) -> float:
    """Return the seconds of the operation until the last rank has ended."""
    simgrid = import_simgrid()
    threading.stack_size(_STACK_BYTES)
    engine = simgrid.Engine(["paceline", *_CONFIGURATION])
    hosts = _build(simgrid, job)
    rounds = job.simulated_rounds
    ended_s: list[float] = [0.0, 0.0]

    def rank(number: int) -> None:
        if rounds is None:
            _carry_out(simgrid, _channels(job, number), number)
        else:
            steps = iter(SCHEDULES[job.algorithm](number, job.ranks, job.length))
            _carry_out(simgrid, [islice(steps, rounds[0])], number)
            ended_s[0] = max(ended_s[0], engine.clock)
            _carry_out(simgrid, [islice(steps, rounds[1] - rounds[0])], number)
        ended_s[1] = max(ended_s[1], engine.clock)

    for number, host in enumerate(hosts):
        simgrid.Actor.create(f"rank{number}", host, rank, number)
    engine.run()
    if rounds is None:
        return ended_s[1]
    pace_s = (ended_s[1] - ended_s[0]) / (rounds[1] - rounds[0])
    return ended_s[1] + pace_s * (job.cost.rounds - rounds[1])


def _channels(job: Simulation, rank: int) -> list[Iterator[Step]]:
    """Return the steps of a rank, one sequence for each chunk in flight."""
    schedule = SCHEDULES[job.algorithm]
    if not job.in_chunks:
        return [iter(schedule(rank, job.ranks, job.length))]
    spans = chunks(job.length, chunk_length(job.algorithm, job.ranks, 1))
    count = min(concurrent_chunks(job.algorithm), len(spans))

    def channel(own: list[Span]) -> Iterator[Step]:
        for span in own:
            yield from schedule(rank, job.ranks, len(span))

    return [channel(spans[number::count]) for number in range(count)]


def _carry_out(simgrid: Any, channels: list[Iterator[Step]], rank: int) -> None:
    """Send and receive the messages of all channels, each at its own pace."""
    pending: list[tuple[int, Any, Any]] = []
    for number, steps in enumerate(channels):
        pending += _next(simgrid, number, steps, rank)
    while pending:
        ended = pending.pop(simgrid.Comm.wait_any([comm for _, comm, _ in pending]))
        number = ended[0]
        if all(other != number for other, _, _ in pending):
            pending += _next(simgrid, number, channels[number], rank)


def _next(
    simgrid: Any, channel: int, steps: Iterator[Step], rank: int
) -> list[tuple[int, Any, Any]]:
    """Start the messages of the next step of a channel; none at its end."""
    started: list[tuple[int, Any, Any]] = []
    while not started:  # a step without messages has ended
        step = next(steps, None)
        if step is None:
            return []
        for receive in step.receives:
            mailbox = simgrid.Mailbox.by_name(f"{channel}:{receive.peer}>{rank}")
            started.append((channel, *mailbox.get_async()))
        for send in step.sends:
            mailbox = simgrid.Mailbox.by_name(f"{channel}:{rank}>{send.peer}")
            started.append((channel, mailbox.put_async(None, len(send.span)), None))
    return started


def _build(simgrid: Any, job: Simulation) -> list[Any]:
    """Build the network; return the hosts by rank."""
    root = simgrid.NetZone.create_star_zone("network")
    rack_hosts = job.topology.rack_hosts
    if rack_hosts is None:
        hosts = [_host(simgrid, root, job, rank) for rank in range(job.ranks)]
    else:
        hosts = []
        for first in range(0, job.ranks, rack_hosts):
            rack = simgrid.NetZone.create_star_zone(f"rack{first}")
            rack.set_parent(root)
            members = range(first, min(first + rack_hosts, job.ranks))
            hosts += [_host(simgrid, rack, job, rank) for rank in members]
            gateway = rack.create_router(f"switch{first}")
            rack.seal()
            rate = job.bytes_per_s * rack_hosts / job.topology.oversubscription
            _connect(simgrid, root, rack.netpoint, gateway, _Cable(f"uplink{first}", rate, job))
    root.seal()
    return hosts


class _Cable:
    """A link with both directions; latency is divided between the two cables of a switch."""

    def __init__(self, name: str, bytes_per_s: float, job: Simulation) -> None:
        self.name, self.bytes_per_s, self.latency_s = name, bytes_per_s, job.latency_s / 2


def _host(simgrid: Any, zone: Any, job: Simulation, rank: int) -> Any:
    host = zone.create_host(f"host{rank}", 1e9)
    _connect(simgrid, zone, host.netpoint, None, _Cable(f"cable{rank}", job.bytes_per_s, job))
    return host


def _connect(simgrid: Any, zone: Any, netpoint: Any, gateway: Any, cable: _Cable) -> None:
    link = zone.create_split_duplex_link(cable.name, cable.bytes_per_s)
    link.set_latency(cable.latency_s)
    link.seal()
    up = simgrid.LinkInRoute(link, simgrid.LinkInRoute.UP)
    zone.add_route(netpoint, None, gateway, None, [up], True)


def main() -> None:
    """Simulate the job that standard input describes, within its limit of seconds."""
    values = json.load(sys.stdin)
    signal.alarm(values.pop("limit_s"))
    job = Simulation(**{**values, "topology": Topology(**values["topology"])})
    print(json.dumps(simulate(job)))


if __name__ == "__main__":
    main()
