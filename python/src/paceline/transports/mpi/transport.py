"""MPI as a torch.distributed backend named `mpi4py`: the registration, and Paceline's transport.

PyPI's torch is built without MPI; this gives DistributedDataParallel the real thing all the same.
Importing this module initialises MPI (mpi4py does) and registers the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore

from paceline.errors import EnvironmentLacks, PacelineError, UsageError
from paceline.transports.mpi.group import BACKEND, MpiProcessGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.plan.trial import Trial
    from paceline.spec.values import Algorithm
    from paceline.training.context import RankContext

_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a group of this backend can be told: `init_process_group("mpi4py", pg_options=…)`.

    algorithm: of all-reduce. Groups made later have the default group's unless told otherwise.
    """

    algorithm: Algorithm = "auto"


def _create_group(given: Any, options: Any) -> MpiProcessGroup:
    """What torch calls for each group that this rank is in."""
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
    """Those given, else the default group's. Raises UsageError for another backend's."""
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


class MpiTransport:
    """Blocking MPI collectives on a progress thread of this rank."""

    name = "mpi"

    def __init__(self) -> None:
        self._group: MpiProcessGroup | None = None

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        dist.init_process_group(
            BACKEND,
            store=PrefixStore("mpi", store),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=trial.limits.collective_s),
            pg_options=Options(algorithm=trial.algorithm or "auto"),
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
            **(self._group.describe() if self._group is not None else {}),
        }

    def close(self, *, failed: bool) -> None:
        if failed and self._group is not None:
            self._group.abort()
        if dist.is_initialized():
            dist.destroy_process_group()


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
