"""A rank that torchrun started: its place from torchrun's variables, rank 0's address from a file.

torchrun gives MASTER_ADDR and MASTER_PORT, but a store there listens on every interface; so rank 0
binds a socket of its own and says where in the trial's directory.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from paceline.errors import DataError, EnvironmentLacks, TimedOut
from paceline.host.machine import host_name
from paceline.host.processes import process_started_unix_s
from paceline.job.byhand import prepare
from paceline.job.rendezvous import listen_on
from paceline.records.files import read_json, write_json
from paceline.training.context import RankContext, StoreAddress

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.job.options import Job

_POLL_S = 0.05
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment and all(n in environment for n in _NEEDED)


def torchrun_world(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(nodes, ranks per node). Raises EnvironmentLacks if there are several nodes."""
    ranks, on_node = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    if ranks != on_node:
        raise EnvironmentLacks(
            f'launcher "torchrun" starts ranks on one node only, there are {ranks} in all and '
            f'{on_node} here; use "mpi" or "spark" for several nodes'
        )
    return 1, ranks


def torchrun_context(job: Job) -> RankContext:
    """This rank's place. Rank 0 prepares the trial's directory (by hand) before the others see it.

    Raises TimedOut if rank 0's address does not come within `limits.rendezvous_s`.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        prepare(job)
    store = None if world_size == 1 else _exchange(job, rank)
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ["LOCAL_RANK"]),
        ranks_on_node=world_size,
        node_index=0,
        host=host_name(),
        process_started_unix_s=process_started_unix_s(os.getpid()) or time.time(),
        store=store,
    )


def _exchange(job: Job, rank: int) -> StoreAddress:
    path = job.files.root / "rendezvous.json"
    agent = os.getppid()  # tells this start from any before it
    if rank == 0:
        address = listen_on(job.trial.interface)
        write_json(path, {"agent": agent, "host": address.host, "port": address.port})
        return address
    return _wait_for(path, agent, job.trial.limits.rendezvous_s, rank)


def _wait_for(path: Path, agent: int, limit_s: float, rank: int) -> StoreAddress:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            document = read_json(path)
        except DataError:
            document = {}  # rank 0 has not written it yet
        if document.get("agent") == agent:
            return StoreAddress(host=document["host"], port=document["port"])
        time.sleep(_POLL_S)
    raise TimedOut(
        f"rank {rank} waited {limit_s:g} s for rank 0 to say in {path} where it listens; look at "
        "rank 0's log, or raise limits.rendezvous_s (--rendezvous-timeout)"
    )
