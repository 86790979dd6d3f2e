"""MPI for anybody's torch: import this, then `init_process_group("mpi4py")`.

Importing it initialises MPI, registers the backend, and sets the variables that torchrun sets, so
that torch finds its peers without being told. From then on an error that a rank does not catch ends
all ranks. docs/reference/mpi-backend.md says what the backend can do.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

from mpi4py import MPI
from mpi4py.run import set_abort_status
from torch._C._distributed_c10d import TCPStore

from paceline.errors import EnvironmentLacks, TimedOut
from paceline.host.machine import host_name
from paceline.job.rendezvous import interface_address
from paceline.plan.trial import LOOPBACK
from paceline.transports.mpi.polling import poll
from paceline.transports.mpi.transport import Options
from paceline.transports.mpi.world import World

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Options"]

INTERFACE_VARIABLE = "PACELINE_INTERFACE"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEET_S = 120.0  # from the first rank's import to the last one's
_BACKLOG = 1024
_ANY_PORT = 9  # of UDP, to which nothing is sent

_served: list[TCPStore] = []  # rank 0's, for as long as the process lives


def _prepare_environment() -> None:
    """Serve a store on rank 0 and say where, as torchrun does; collective over MPI's world.

    Does nothing where somebody has said it already: torchrun, or whoever started the ranks.
    Raises TimedOut if a rank does not import this module, EnvironmentLacks if ranks on several
    hosts cannot reach rank 0.
    """
    if all(os.environ.get(name) for name in _NEEDED):
        return
    if not poll(MPI.COMM_WORLD.Ibarrier(), _MEET_S):
        raise TimedOut(
            f"rank {MPI.COMM_WORLD.rank} waited {_MEET_S:g} s for all {MPI.COMM_WORLD.size} ranks "
            "to import paceline.mpi; every rank must, look at the other ranks' output"
        )
    world = World()
    hosts = world.gather(host_name())
    served = world.of_rank_0(_serve(hosts) if world.rank == 0 else None)
    if not isinstance(served, tuple):
        raise EnvironmentLacks(str(served))
    host, port = served
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.ranks_on_node),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(True),  # torch's words for: the store is there already
    )
    if world.size > 1:
        sys.excepthook = _end_all_ranks


def _end_all_ranks(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """After an error that nobody caught: without this, the peers would wait for their limit."""
    sys.__excepthook__(kind, error, trace)
    # Not at once: torch's own hook calls this one, and prints only after it what was said here.
    set_abort_status(1)


def _serve(hosts: list[str]) -> tuple[str, int] | str:
    """Where rank 0 serves a store now, or why it cannot: all ranks are to know.

    It listens on one address alone (given only a name, TCPStore listens on all of them).
    """
    try:
        host = _own_address(hosts)
    except EnvironmentLacks as error:
        return str(error)
    listener = socket.create_server((host, 0), backlog=_BACKLOG)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        host, port, len(hosts), is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    _served.append(store)
    return host, port


def _own_address(hosts: list[str]) -> str:
    """The address of this host by which the others reach it; loopback if there are no others."""
    interface = os.environ.get(INTERFACE_VARIABLE)
    if interface:
        return interface_address(interface)
    others = [host for host in hosts if host != hosts[0]]
    if not others:
        return interface_address(LOOPBACK)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], _ANY_PORT))  # sends nothing, only looks up the route
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentLacks(_no_route(others[0], str(error))) from error
    if address.startswith("127."):
        raise EnvironmentLacks(_no_route(others[0], f"its name leads to {address}"))
    return address


def _no_route(other: str, reason: str) -> str:
    return (
        f"host {host_name()} does not know by which address host {other} reaches it ({reason}): "
        f"name the network interface between them, {INTERFACE_VARIABLE}=eth0, say"
    )


_prepare_environment()
