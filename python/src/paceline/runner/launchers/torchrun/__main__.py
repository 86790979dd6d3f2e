"""`torchrun … -m paceline.runner.launchers.torchrun`: one rank that torchrun started.

Its place comes from torchrun's variables. torchrun also provides MASTER_ADDR and MASTER_PORT, but a
store there listens on every interface. So rank 0 binds a socket of its own and writes the address
to a file in the trial's directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.collectives.host import host_name
from paceline.runner.job import (
    Job,
    StoreAddress,
    check_started_once,
    finish,
    listen_on,
    parse_job,
    prepare,
    rank_context,
    run_guarded,
    run_rank,
)
from paceline.runner.job.context import launching_pid
from paceline.runner.job.job import check_world
from paceline.runner.job.rendezvous import exchange_address

_PROG = "python -m paceline.runner.launchers.torchrun"


def main() -> int:
    rank, ranks = torchrun_place()
    job = parse_job("torchrun", _PROG)
    check_world(job.trial, ranks)
    check_started_once()
    if rank == 0 and not _restarts():
        prepare(job)
    store = None if ranks == 1 else _store_address(job, rank)
    context = rank_context(rank, [host_name()] * ranks, store)
    end = run_rank(job, context, [launching_pid()])
    if rank == 0 or (end.error is not None and not end.secondary):
        finish(job, end)
    return end.exit_code


def torchrun_place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, number of ranks).

    Raises UsageError if torchrun did not start this process, EnvironmentLacks for several nodes.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        raise UsageError(
            "expected torchrun to start this process; use `torchrun --nproc-per-node N -m "
            "paceline.runner.launchers.torchrun`, or start ranks with `python -m "
            "paceline.runner.launchers.local`"
        )
    ranks, on_node = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    if ranks != on_node:
        raise EnvironmentLacks(
            f'launcher "torchrun" starts ranks on one node only; expected {on_node} ranks (those '
            f'of this node), torchrun started {ranks}; use "mpi" or "spark" for several nodes'
        )
    return int(environment["RANK"]), ranks


def _store_address(job: Job, rank: int) -> StoreAddress:
    """Return rank 0's address. Raises TimedOut after `limits.rendezvous_s`."""
    own = listen_on(job.trial.interface) if rank == 0 else None
    return exchange_address(job, rank, own, f"{os.getppid()} {_restarts()}")


def _restarts() -> int:
    """Return how often the agent has started its ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


if __name__ == "__main__":
    sys.exit(run_guarded(main))
