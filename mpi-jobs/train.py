"""Train one trial as one rank of an MPI job.

    mpirun -n 2 python mpi-jobs/train.py --workload tiny --data DATASET --out RUN_DIR

Rank, world and peers come from MPI; all else is Paceline's worker. An error on any rank ends the
whole job, so no `-m mpi4py` is needed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

try:
    import paceline  # noqa: F401
except ImportError:  # from the archive: the package lies beside this script
    sys.path.insert(0, str(Path(__file__).resolve().with_name("paceline.zip")))

from paceline.host.machine import host_name
from paceline.job.byhand import finish, launching_pid, prepare
from paceline.job.options import asked_ranks, check_not_alone, job_of, parser
from paceline.job.rendezvous import check_reachable
from paceline.launchers.mpi.rank import find_nodes, run_as_rank, train_in
from paceline.transports.mpi.world import World


def main(world: World) -> int:
    """This rank's part; returns an exit code, raises PacelineError."""
    options = parser("mpi-jobs/train.py").parse_args()
    check_not_alone(world.size, asked_ranks(options))
    nodes = find_nodes(world)
    job = job_of(options, "mpi", nodes=len(nodes), ranks_per_node=world.ranks_on_node)
    check_reachable(job.trial.interface, nodes)
    if world.rank == 0:
        prepare(job)
    launchers = world.gather((host_name(), launching_pid()))
    watched = sorted({pid for host, pid in launchers if host == host_name()})
    started_by_mpi = launching_pid() != os.getpid()  # else by a shell, or by slurmstepd
    end = train_in(world, job, nodes, watched, parent_is_launcher=started_by_mpi)
    if world.rank == 0 or (end.error is not None and not end.secondary):
        finish(job, end)
    return end.exit_code


if __name__ == "__main__":
    sys.exit(run_as_rank(World(), main))
