"""One rank of an MPI job: `python -m paceline.runner.launchers.mpi.rank`, or mpi-jobs/train.py.

Rank, world and peers come from MPI. A barrier task of Spark may have started mpirun; the ranks then
belong to Spark's job, which keeps the records (EnclosingJob).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.base.errors import EnvironmentLacks, ExitCode, PacelineError
from paceline.collectives.host import host_name
from paceline.plan.trials.trial import StoreAddress
from paceline.runner.job.context import launching_pid, nodes_of, rank_context
from paceline.runner.job.job import (
    Job,
    check_not_alone,
    check_reachable,
    check_world,
    listen_on,
    parse_job,
)
from paceline.runner.job.rank import run_rank
from paceline.runner.job.rank_status import RankEnd, run_guarded
from paceline.runner.job.run_directory import (
    Delivery,
    finish,
    in_folder,
    new_folder,
    prepare,
    report_own,
)
from paceline.train.training.resources import keep_freed_memory

if TYPE_CHECKING:
    from paceline.collectives.mpi.world import World

# Rank 0 reports an error that all ranks share; its Abort then ends the others.
_RANK_0_REPORTS_S = 1.0
_ENCLOSING_VARIABLE = "PACELINE_ENCLOSING_JOB"


@dataclass(frozen=True, slots=True)
class EnclosingJob:
    """The job of another launcher that runs this MPI job in its own slots."""

    launcher: str
    ranks: list[int]  # those that have slots on this host
    watched_pids: list[int]  # roots of the process trees to observe on this host

    @classmethod
    def from_environment(cls) -> EnclosingJob | None:
        text = os.environ.get(_ENCLOSING_VARIABLE)
        return None if text is None else cls(**json.loads(text))

    def environment(self) -> dict[str, str]:
        """Return the variables from which a rank reads this back."""
        return {_ENCLOSING_VARIABLE: json.dumps(asdict(self))}

    def check_rank(self, rank: int) -> None:
        """Raise EnvironmentLacks if mpirun placed the rank on a host where it has no slot."""
        if rank not in self.ranks:
            raise EnvironmentLacks(
                f"rank {rank} is on host {host_name()}, where {self.launcher} has the tasks "
                f"{self.ranks}: mpirun placed it differently; remove the mapping from [mpi] "
                "arguments"
            )


def main() -> int:
    """Train as the rank that MPI says; return the exit code."""
    keep_freed_memory()  # before MPI starts threads, of which each gets an arena of its own
    from paceline.collectives.mpi.world import World  # noqa: PLC0415  (it initialises MPI)

    return run_as_rank(World(), train)


def run_as_rank(world: World, rank_main: Callable[[World], int]) -> int:
    """Run this rank's main function. Return its exit code if it is OK, else end all ranks."""

    def rank_0_first() -> int:
        try:
            return rank_main(world)
        except PacelineError:
            if world.rank != 0:
                time.sleep(_RANK_0_REPORTS_S)
            raise

    code = run_guarded(rank_0_first)
    if code != ExitCode.OK:
        sys.stdout.flush()
        sys.stderr.flush()
        world.abort(code)
    return code


def train(world: World) -> int:
    """Train as one rank of the world; collective. Return an exit code; raises PacelineError."""
    enclosing = EnclosingJob.from_environment()
    job = _job(world, "mpi" if enclosing is None else enclosing.launcher)
    try:
        return _train_job(world, job, enclosing)
    except PacelineError as error:
        report_own(job, RankEnd.of(error, world.rank, host_name()))
        raise


def _train_job(world: World, job: Job, enclosing: EnclosingJob | None) -> int:
    check_not_alone(world.size, job.trial.placement.ranks)
    hosts = world.gather(world.of_this_node(host_name()))
    nodes = nodes_of(hosts, "use mpirun --map-by ppr:N:node or srun --ntasks-per-node")
    check_world(job.trial, world.size, len(nodes))
    if enclosing is not None:
        enclosing.check_rank(world.rank)
        return _train(world, job, hosts, enclosing.watched_pids).exit_code
    check_reachable(job.trial.interface, nodes)
    if world.rank == 0:
        prepare(job)
    launchers = world.gather((host_name(), launching_pid()))  # now rank 0 has prepared the job
    watched_pids = sorted({pid for host, pid in launchers if host == host_name()})
    started_by_mpi = launching_pid() != os.getpid()  # else by a shell or by slurmstepd
    job, delivery = _on_this_node(world, job, hosts[world.rank])
    end = _train(world, job, hosts, watched_pids, parent_is_launcher=started_by_mpi)
    if world.rank == 0 or (end.error is not None and not end.secondary):
        finish(job, end)
    if delivery is not None and end.exit_code == ExitCode.OK:
        delivery.wait()
    return end.exit_code


def _job(world: World, launcher: str) -> Job:
    """Return the job that rank 0 reads, because other hosts may not see its files; collective."""
    own = parse_job(launcher, "mpi-jobs/train.py") if world.rank == 0 else None
    job = world.of_rank_0(own)
    assert job is not None
    return job


def _on_this_node(world: World, job: Job, host: str) -> tuple[Job, Delivery | None]:
    """Return the job with its files as this node sees them; collective.

    Raises EnvironmentLacks in all ranks if a node needs a run directory that it does not see. So no
    rank begins, and the others are not taken for the cause.
    """
    is_first = world.local_rank == 0
    folder, refusal = world.of_this_node(_folder(job, host) if is_first else (None, None))
    refusals = list(filter(None, world.gather(refusal)))
    if refusals:
        raise EnvironmentLacks(refusals[0])
    found = in_folder(job, folder, host, ranks=world.ranks_on_node, is_first=is_first)
    if job.place is not None:  # a node may have fetched a lot
        world.wait_for_all(job.trial.limits.trial_s)
    return found


def _folder(job: Job, host: str) -> tuple[str | None, str | None]:
    """Return the name of this node's folder, and why the node is refused."""
    try:
        return new_folder(job, host), None
    except EnvironmentLacks as error:
        return None, str(error)


def _train(
    world: World,
    job: Job,
    hosts: Sequence[str],
    watched_pids: Sequence[int],
    *,
    parent_is_launcher: bool = True,
) -> RankEnd:
    """Do the work of this rank; collective. Raises TimedOut if other ranks do not end."""
    context = rank_context(world.rank, hosts, _store_address(world, job))
    end = run_rank(job, context, watched_pids, parent_is_launcher=parent_is_launcher)
    if end.exit_code == ExitCode.OK:
        world.wait_for_all(job.trial.limits.collective_s)
    return end


def _store_address(world: World, job: Job) -> StoreAddress:
    """Listen on rank 0 and send the address to the other ranks; collective."""
    address = listen_on(job.trial.interface) if world.rank == 0 else None
    found = world.of_rank_0(None if address is None else address.for_peers())
    assert found is not None
    return address or found


if __name__ == "__main__":
    sys.exit(main())
