"""`python -m paceline.launchers.local`: start ranks on this node, or be one of them.

- a single rank trains in this process;
- several become children of this process, each of which comes here again;
- under torchrun (`torchrun … -m paceline.launchers.local …`) this process is one rank.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from paceline.host.machine import host_name
from paceline.host.processes import die_with_parent, process_started_unix_s
from paceline.job.byhand import finish, launching_pid, prepare
from paceline.job.messages import run_guarded
from paceline.job.options import job_of, parser
from paceline.job.rank import run_rank
from paceline.launchers.local.node import PARENT_VARIABLE, RANK_VARIABLE, STORE_VARIABLE, run_ranks
from paceline.launchers.torchrun.rank import started_by_torchrun, torchrun_context, torchrun_world
from paceline.training.context import RankContext, StoreAddress

if TYPE_CHECKING:
    import argparse


def main() -> int:
    options = parser("python -m paceline.launchers.local").parse_args()
    if RANK_VARIABLE in os.environ:
        return _child(options)
    if started_by_torchrun():
        return _torchrun_rank(options)
    return _node(options)


def _node(options: argparse.Namespace) -> int:
    job = job_of(options, "local", nodes=1, ranks_per_node=None)
    prepare(job)
    if job.trial.placement.ranks > 1:
        end = run_ranks(job)
    else:
        context, watched = _context(0, 1, None), [os.getpid()]
        end = run_rank(job, context, watched, parent_is_launcher=job.managed)
    finish(job, end)
    return end.exit_code


def _child(options: argparse.Namespace) -> int:
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    rank = int(os.environ[RANK_VARIABLE])
    host, port, descriptor = os.environ[STORE_VARIABLE].split(":")
    job = job_of(options, "local", nodes=1, ranks_per_node=None)
    address = StoreAddress(
        host=host, port=int(port), listen_fd=int(descriptor) if descriptor else None
    )
    return run_rank(
        job, _context(rank, job.trial.placement.ranks, address), [os.getppid()]
    ).exit_code


def _torchrun_rank(options: argparse.Namespace) -> int:
    nodes, ranks_per_node = torchrun_world()
    job = job_of(options, "torchrun", nodes=nodes, ranks_per_node=ranks_per_node)
    context = torchrun_context(job)
    end = run_rank(job, context, [launching_pid()])
    if context.is_first or (end.error is not None and not end.secondary):
        finish(job, end)
    return end.exit_code


def _context(rank: int, ranks: int, store: StoreAddress | None) -> RankContext:
    return RankContext(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        ranks_on_node=ranks,
        node_index=0,
        host=host_name(),
        process_started_unix_s=process_started_unix_s(os.getpid()) or time.time(),
        store=store,
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
