"""`python -m paceline.launchers.local`: start the ranks on this node, or be one of them.

A single rank trains in this process. Several ranks become children of this process, each of which
runs this module again.
"""

from __future__ import annotations

import os
import sys

from paceline.host.machine import host_name
from paceline.job import (
    Job,
    StoreAddress,
    check_started_once,
    finish,
    parse_job,
    prepare,
    rank_context,
    run_guarded,
    run_rank,
)
from paceline.launchers.local.node import RANK_VARIABLE, STORE_VARIABLE, run_ranks


def main() -> int:
    job = parse_job("local", "python -m paceline.launchers.local")
    if RANK_VARIABLE in os.environ:
        return _child(job)
    check_started_once()
    prepare(job)
    if job.trial.placement.ranks > 1:
        end = run_ranks(job)
    else:
        context = rank_context(0, [host_name()], None)
        end = run_rank(job, context, [os.getpid()], parent_is_launcher=job.supervised)
    finish(job, end)
    return end.exit_code


def _child(job: Job) -> int:
    host, port, descriptor = os.environ[STORE_VARIABLE].split(":")
    listen_fd = int(descriptor) if descriptor else None
    store = StoreAddress(host=host, port=int(port), listen_fd=listen_fd)
    hosts = [host_name()] * job.trial.placement.ranks
    context = rank_context(int(os.environ[RANK_VARIABLE]), hosts, store)
    return run_rank(job, context, [os.getppid()]).exit_code


if __name__ == "__main__":
    sys.exit(run_guarded(main))
