"""One rank of a job that no launcher looks after: whether it ends, and why, is its own doing.

usage: rank.py RANK SIZE NODE MEETING_FILE OPTIONS…

Every rank is on a node of its own; OPTIONS are those of the job scripts. Rank 0 leaves the store's
address in MEETING_FILE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from paceline.collectives.host import host_name
from paceline.plan.trials.trial import RankContext, StoreAddress
from paceline.runner.job.job import listen_on, parse_job
from paceline.runner.job.rank import run_rank
from paceline.runner.job.run_directory import prepare

_MEET_S = 30.0


def meeting_place(file: Path, rank: int, interface: str) -> StoreAddress:
    if rank == 0:
        address = listen_on(interface)
        part = file.with_suffix(".part")
        part.write_text(json.dumps([address.host, address.port, address.secret]))
        part.rename(file)
        return address
    limit = time.monotonic() + _MEET_S
    while not file.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"rank 0 did not write {file}")
        time.sleep(0.05)
    host, port, secret = json.loads(file.read_text())
    return StoreAddress(host=host, port=port, secret=secret)


def main() -> int:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    job = parse_job("mpi", "rank.py", sys.argv[4:])
    if rank == 0:
        prepare(job)
    context = RankContext(
        rank=rank,
        world_size=size,
        local_rank=0,
        ranks_on_node=1,
        node_index=rank,
        host=host_name(),
        process_started_unix_s=time.time(),
        store=meeting_place(Path(sys.argv[3]), rank, job.trial.interface),
    )
    return run_rank(job, context, [os.getpid()]).exit_code


if __name__ == "__main__":
    sys.exit(main())
