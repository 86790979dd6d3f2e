"""An all-reduce of Gloo between probes. It imports torch."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.collectives.store import connect_store
from paceline.plan.trials.trial import StoreAddress

_FLOAT_BYTES = 4


def all_reduce_s(
    place: tuple[int, int],
    address: StoreAddress,
    interface: str,
    payload_bytes: int,
    repeats: int,
    limit_s: float,
) -> float:
    """Return the seconds of the fastest all-reduce; collective.

    place: the rank of this probe and the number of probes. address: where rank 0 listens.
    Raises TimedOut if the store does not answer, RuntimeError if Gloo fails or takes longer.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    rank, ranks = place
    host, port, listen_fd = address.host, address.port, address.listen_fd
    dist.init_process_group(
        "gloo",
        store=connect_store(host, port, rank, ranks, limit_s, listen_fd),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=limit_s),
    )
    values = torch.ones(max(1, payload_bytes // _FLOAT_BYTES))
    took_s = []
    for _ in range(repeats):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(values)
        took_s.append(time.perf_counter() - began_s)
    dist.destroy_process_group()
    return min(took_s)
