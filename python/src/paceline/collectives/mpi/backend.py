"""The registration of MPI as torch.distributed backend `mpi4py`.

torch from PyPI is built without MPI. Importing this module initialises MPI (mpi4py does) and
registers the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from paceline.collectives.errors import EnvironmentLacks, UsageError
from paceline.collectives.gloo_group import check_asked
from paceline.collectives.message_schedules import Algorithm
from paceline.collectives.mpi.process_group import BACKEND, MpiProcessGroup
from paceline.collectives.recorder import GroupDescription

_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a group of this backend: `init_process_group("mpi4py", pg_options=…)`.

    algorithm: all-reduce algorithm. Later groups use that of the default group unless they state
    their own.
    """

    algorithm: Algorithm = "auto"


def _create_group(given: Any, options: Any) -> MpiProcessGroup:
    """Create a group; torch calls this for each group that contains this rank."""
    check_asked(BACKEND)
    members = list(given.global_ranks_in_group)
    if not members:  # the default group
        check_world(given.group_rank, given.group_size)
    return MpiProcessGroup(
        rank=given.group_rank,
        size=given.group_size,
        world_ranks=members,
        name=given.group_id,
        limit_s=given.timeout.total_seconds(),
        store=given.store,
        algorithm=_chosen(options).algorithm,
    )


def _chosen(options: Any) -> Options:
    """Return the given options, or those of the default group. Raises UsageError for another
    backend's options."""
    if options is None:
        default = dist.group.WORLD
        if isinstance(default, MpiProcessGroup):
            return Options(algorithm=default.algorithm)
        return Options()
    if not isinstance(options, Options):
        raise UsageError(
            f"backend {BACKEND}: expected pg_options of type paceline.mpi.Options, got "
            f"{type(options).__name__}"
        )
    return options


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])


def check_world(rank: int, world_size: int) -> None:
    """Raise EnvironmentLacks unless MPI_COMM_WORLD matches this trial and threads may call MPI."""
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise EnvironmentLacks(
            f"expected to be rank {rank} of {world_size} in MPI_COMM_WORLD, but MPI reports rank "
            f"{world.rank} of {world.size}: transport 'mpi' needs ranks started by mpirun or "
            "by srun with the matching --mpi plugin (try `srun --mpi=list`)"
        )
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        raise EnvironmentLacks(
            f"this MPI provides {_THREAD_LEVELS[level]}, transport 'mpi' needs "
            "MPI_THREAD_MULTIPLE: use an MPI library that supports it"
        )


def describe_library() -> GroupDescription:
    """Return name and version of the MPI library, and how threads may call it."""
    version = MPI.Get_library_version().strip("\0 \n")
    return {
        "library": version.splitlines()[0].split(", package")[0],
        "thread_level": _THREAD_LEVELS[MPI.Query_thread()],
    }
