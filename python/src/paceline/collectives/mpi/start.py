"""MPI backend for any torch program: import this, then call `init_process_group("mpi4py")`.

Importing this module initialises MPI, registers the backend, and sets the variables of torchrun, so
that torch finds its peers. From then on an uncaught error of one rank ends all ranks.
docs/reference/back-ends.md describes the features of the backend.
"""

from __future__ import annotations

import os
import socket
import sys
from types import TracebackType

from mpi4py import MPI
from mpi4py.run import set_abort_status

from paceline.collectives.errors import EnvironmentLacks, TimedOut
from paceline.collectives.host import LOOPBACK, address_towards, host_name, interface_address
from paceline.collectives.mpi.process_group import Options
from paceline.collectives.mpi.world import World, poll_until
from paceline.collectives.signatures import new_secret, use_secret
from paceline.collectives.torch_internals import TCPStore

__all__ = ["Options"]

INTERFACE_VARIABLE = "PACELINE_INTERFACE"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_IMPORT_LIMIT_S = 120.0  # from the first rank's import to the last one's
_BACKLOG = 1024

_served: list[TCPStore] = []  # keeps rank 0's store alive until the process ends


def _prepare_environment() -> None:
    """Serve a store on rank 0 and set its address, as torchrun does; collective over
    MPI_COMM_WORLD.

    Does nothing if the variables are already set, for example by torchrun. Raises TimedOut if a
    rank does not import this module, EnvironmentLacks if ranks on several hosts cannot reach rank
    0.
    """
    if all(os.environ.get(name) for name in _NEEDED):
        return
    if not poll_until(MPI.COMM_WORLD.Ibarrier().Test, _IMPORT_LIMIT_S):
        raise TimedOut(
            f"rank {MPI.COMM_WORLD.rank} waited {_IMPORT_LIMIT_S:g} s for all "
            f"{MPI.COMM_WORLD.size} ranks to import paceline.mpi; every rank must import it, look "
            "at the output of the other ranks"
        )
    world = World()
    hosts = world.gather(host_name())
    served = world.of_rank_0(_serve(hosts) if world.rank == 0 else None)
    if not isinstance(served, tuple):
        raise EnvironmentLacks(str(served))
    host, port, secret = served
    use_secret(secret)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.ranks_on_node),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(True),  # tells torch that the store exists already
    )
    if world.size > 1:
        sys.excepthook = _end_all_ranks


def _end_all_ranks(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End all ranks after an uncaught error; otherwise the peers would wait until their limit."""
    sys.__excepthook__(kind, error, trace)
    # The abort is delayed, because torch's own hook calls this one and prints the error afterwards.
    set_abort_status(1)


def _serve(hosts: list[str]) -> tuple[str, int, str] | str:
    """Serve a store on rank 0 and return its address and a secret to sign what is stored, or the
    reason why it cannot, for all ranks.

    It listens on one address only (given only a host name, TCPStore listens on all addresses).
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
    return host, port, new_secret()


def _own_address(hosts: list[str]) -> str:
    """Return the address of this host that the others can reach; loopback if there are no
    others."""
    interface = os.environ.get(INTERFACE_VARIABLE)
    if interface:
        return interface_address(interface)
    others = [host for host in hosts if host != hosts[0]]
    if not others:
        return interface_address(LOOPBACK)
    try:
        address = address_towards(others[0])
    except OSError as error:
        raise EnvironmentLacks(_no_route(others[0], str(error))) from error
    if address.startswith("127."):
        raise EnvironmentLacks(_no_route(others[0], f"its host name resolves to {address}"))
    return address


def _no_route(other: str, reason: str) -> str:
    return (
        f"host {host_name()} cannot determine its address for host {other} ({reason}); set the "
        f"network interface between them, for example {INTERFACE_VARIABLE}=eth0"
    )


_prepare_environment()
