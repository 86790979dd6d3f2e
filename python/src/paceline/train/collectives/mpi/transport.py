"""MPI as a torch.distributed backend named `mpi4py`: the transport and the registration.

PyPI's torch is built without MPI; this gives DistributedDataParallel the real thing all the same.
Importing this module initialises MPI (mpi4py does) and registers the backend.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore

from paceline.errors import EnvironmentLacks, PacelineError
from paceline.train.collectives.mpi.group import BACKEND, MpiProcessGroup
from paceline.train.collectives.store import open_store
from paceline.train.context import RankContext, StoreAddress

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.plan.trial import Trial

_LOOPBACK = "127.0.0.1"
_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}


def _create_group(options: Any, _backend_options: Any) -> MpiProcessGroup:
    return MpiProcessGroup(
        rank=options.group_rank,
        size=options.group_size,
        world_ranks=list(options.global_ranks_in_group),
        name=options.group_id,
        limit_s=options.timeout.total_seconds(),
        store=options.store,
    )


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu"])


class MpiTransport:
    """Blocking MPI collectives on a progress thread of this rank."""

    name = "mpi"

    def __init__(self) -> None:
        self._group: MpiProcessGroup | None = None

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        check_world(context.rank, context.world_size)
        dist.init_process_group(
            BACKEND,
            store=PrefixStore("mpi", store),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=trial.limits.collective_s),
        )
        group = dist.group.WORLD
        assert isinstance(group, MpiProcessGroup)
        self._group = group

    def explain(self, error: Exception) -> PacelineError | None:  # noqa: ARG002
        # What DDP raises is a copy without its type; the group knows the original.
        return self._group.failure if self._group is not None else None

    def describe(self) -> dict[str, Any]:
        version = MPI.Get_library_version().strip("\0 \n")
        return {
            "library": version.splitlines()[0].split(", package")[0],
            "thread_level": _THREAD_LEVELS[MPI.Query_thread()],
        }

    def close(self, *, failed: bool) -> None:
        if failed and self._group is not None:
            self._group.abort()
        if dist.is_initialized():
            dist.destroy_process_group()


def init_process_group(timeout: timedelta) -> None:
    """Make MPI's world torch's default group, for scripts that do not use Paceline's worker.

    The ranks of one host; other groups (of Gloo, say) can be made beside it, through a store that
    rank 0 serves on loopback. timeout: of every operation.
    """
    world = MPI.COMM_WORLD
    check_world(world.rank, world.size)
    listener = socket.create_server((_LOOPBACK, 0)) if world.rank == 0 else None
    port = world.bcast(listener.getsockname()[1] if listener else 0)
    context = RankContext(
        rank=world.rank,
        world_size=world.size,
        local_rank=world.rank,
        ranks_on_node=world.size,
        node_index=0,
        host=_LOOPBACK,
        process_started_unix_s=time.time(),
        store=StoreAddress(
            host=_LOOPBACK, port=port, listen_fd=listener.detach() if listener else None
        ),
    )
    store = open_store(context, timeout.total_seconds())
    dist.init_process_group(
        BACKEND, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )


def check_world(rank: int, world_size: int) -> None:
    """Raise EnvironmentLacks unless MPI's world is this trial's and threads may call MPI."""
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise EnvironmentLacks(
            f"expected to be rank {rank} of {world_size} of MPI's world, but MPI says rank "
            f"{world.rank} of {world.size}: the transport 'mpi' needs ranks started by mpirun or "
            "by srun with the matching --mpi plugin (try `srun --mpi=list`)"
        )
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        raise EnvironmentLacks(
            f"this MPI gives {_THREAD_LEVELS[level]}, the transport 'mpi' needs "
            "MPI_THREAD_MULTIPLE: use an MPI library that is built with it"
        )
