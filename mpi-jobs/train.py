"""Train one trial as one rank of an MPI job.

    mpirun -n 2 python mpi-jobs/train.py --workload tiny --data DATASET --out RUN_DIR

Rank, world and peers come from MPI; all else is Paceline's worker. An error on any rank ends the
whole job, so no `-m mpi4py` is needed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

try:
    import paceline  # noqa: F401
except ImportError:  # from the archive: the package lies beside this script
    sys.path.insert(0, str(Path(__file__).resolve().with_name("paceline.zip")))

from mpi4py import MPI

from paceline.errors import EnvironmentLacks, ExitCode, PacelineError, TimedOut
from paceline.job.byhand import finish, launching_pid, prepare
from paceline.job.messages import run_guarded
from paceline.job.options import Job, asked_ranks, check_not_alone, job_of, parser
from paceline.job.rank import run_rank
from paceline.job.rendezvous import check_reachable, listen_on
from paceline.launch.processes import process_started_unix_s
from paceline.records.machine import host_name
from paceline.train.context import RankContext, StoreAddress

# A mistake that all ranks see alike is rank 0's to tell; its Abort then ends the others.
_RANK_0_SPEAKS_S = 1.0
_POLL_S = 0.02


def main(comm: MPI.Intracomm) -> int:
    """This rank's part; returns an exit code, raises PacelineError."""
    options = parser("mpi-jobs/train.py").parse_args()
    check_not_alone(comm.size, asked_ranks(options))
    on_node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    places = comm.allgather((host_name(), on_node.rank, on_node.size, launching_pid()))
    hosts = [host for host, local_rank, *_ in places if local_rank == 0]
    _check_even(places)
    job = job_of(options, "mpi", nodes=len(hosts), ranks_per_node=on_node.size)
    check_reachable(job.trial.interface, hosts)
    context = RankContext(
        rank=comm.rank,
        world_size=comm.size,
        local_rank=on_node.rank,
        ranks_on_node=on_node.size,
        node_index=hosts.index(on_node.bcast(host_name())),
        host=host_name(),
        process_started_unix_s=process_started_unix_s(os.getpid()) or time.time(),
        store=_store_address(comm, job),
    )
    watched = sorted({pid for host, *_, pid in places if host == context.host})
    started_by_mpi = launching_pid() != os.getpid()  # else by a shell, or by slurmstepd
    end = run_rank(job, context, watched, parent_is_launcher=started_by_mpi)
    if end.exit_code == ExitCode.OK:
        _wait_for_all(comm, job.trial.limits.collective_s)
    if context.is_first or (end.error is not None and not end.secondary):
        finish(job, end)
    return end.exit_code


def _check_even(places: list[tuple[str, int, int, int]]) -> None:
    sizes = {host: size for host, _, size, _ in places}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{host}: {size}" for host, size in sizes.items())
        raise EnvironmentLacks(
            f"expected as many ranks on every node, got {listed}; use mpirun --map-by ppr:N:node "
            "or srun --ntasks-per-node"
        )


def _store_address(comm: MPI.Intracomm, job: Job) -> StoreAddress | None:
    """Rank 0 prepares the run directory and listens; the others learn where."""
    address = None
    if comm.rank == 0:
        prepare(job)
        address = listen_on(job.trial.interface)
    found = comm.bcast(None if address is None else (address.host, address.port))
    return address or StoreAddress(host=found[0], port=found[1])


def _wait_for_all(comm: MPI.Intracomm, limit_s: float) -> None:
    """Barrier with a limit: the trial is over when its last rank is."""
    request = comm.Ibarrier()
    deadline = time.monotonic() + limit_s
    while not request.Test():
        if time.monotonic() > deadline:
            raise TimedOut(f"rank {comm.rank} waited {limit_s:g} s for the other ranks to finish")
        time.sleep(_POLL_S)


def _rank_0_first(comm: MPI.Intracomm) -> int:
    try:
        return main(comm)
    except PacelineError:
        if comm.rank != 0:
            time.sleep(_RANK_0_SPEAKS_S)
        raise


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    code = run_guarded(lambda: _rank_0_first(world))
    if code != ExitCode.OK:
        sys.stdout.flush()
        sys.stderr.flush()
        world.Abort(code)
