"""One rank of an MPI job, whoever started it: its place among the others, and one end for all."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, ExitCode, PacelineError
from paceline.host.machine import host_name
from paceline.host.processes import process_started_unix_s
from paceline.job.messages import run_guarded
from paceline.job.rank import RankEnd, run_rank
from paceline.job.rendezvous import listen_on
from paceline.training.context import RankContext, StoreAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.job.options import Job
    from paceline.transports.mpi.world import World

# A mistake that all ranks see alike is rank 0's to tell; its Abort then ends the others.
_RANK_0_SPEAKS_S = 1.0


def run_as_rank(world: World, main: Callable[[World], int]) -> int:
    """Run this rank's `main`; returns its exit code only if it is OK, else ends all ranks."""

    def rank_0_first() -> int:
        try:
            return main(world)
        except PacelineError:
            if world.rank != 0:
                time.sleep(_RANK_0_SPEAKS_S)
            raise

    code = run_guarded(rank_0_first)
    if code != ExitCode.OK:
        sys.stdout.flush()
        sys.stderr.flush()
        world.abort(code)
    return code


def find_nodes(world: World) -> list[str]:
    """The hosts of the world, in the order of their first ranks; collective.

    Raises EnvironmentLacks if they hold different numbers of ranks.
    """
    places = world.gather((host_name(), world.local_rank, world.ranks_on_node))
    sizes = {host: size for host, _, size in places}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{host}: {size}" for host, size in sizes.items())
        raise EnvironmentLacks(
            f"expected as many ranks on every node, got {listed}; use mpirun --map-by ppr:N:node "
            "or srun --ntasks-per-node"
        )
    return [host for host, local_rank, _ in places if local_rank == 0]


def train_in(
    world: World,
    job: Job,
    nodes: Sequence[str],
    watched_pids: Sequence[int],
    *,
    parent_is_launcher: bool = True,
) -> RankEnd:
    """Train as this rank of the world on `nodes`; collective. The last rank's end ends it.

    watched_pids, parent_is_launcher: see run_rank. Raises TimedOut if other ranks do not end.
    """
    context = RankContext(
        rank=world.rank,
        world_size=world.size,
        local_rank=world.local_rank,
        ranks_on_node=world.ranks_on_node,
        node_index=nodes.index(world.of_this_node(host_name())),
        host=host_name(),
        process_started_unix_s=process_started_unix_s(os.getpid()) or time.time(),
        store=_store_address(world, job),
    )
    end = run_rank(job, context, watched_pids, parent_is_launcher=parent_is_launcher)
    if end.exit_code == ExitCode.OK:
        world.wait_for_all(job.trial.limits.collective_s)
    return end


def _store_address(world: World, job: Job) -> StoreAddress:
    """Rank 0 listens; the others learn where."""
    address = listen_on(job.trial.interface) if world.rank == 0 else None
    found = world.of_rank_0(None if address is None else (address.host, address.port))
    assert found is not None
    return address or StoreAddress(host=found[0], port=found[1])
