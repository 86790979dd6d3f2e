"""What the contract tests' programs share: who am I, where do we meet, what is the trial."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from paceline.plan.trial import Placement, Training, Trial
from paceline.spec.models import Limits
from paceline.train.context import RankContext, StoreAddress

_MEET_S = 30.0
CORES = sorted(os.sched_getaffinity(0))


def make_context(folder: Path) -> RankContext:
    """Rank and size as mpirun says, also for Gloo; rank 0 leaves the store's port in `folder`."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    return RankContext(
        rank=rank,
        world_size=size,
        local_rank=rank,
        ranks_on_node=size,
        node_index=0,
        host="testhost",
        process_started_unix_s=time.time(),
        store=_meeting_place(folder / "port", rank) if size > 1 else None,
    )


def _meeting_place(file: Path, rank: int) -> StoreAddress:
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        part = file.with_suffix(".part")
        part.write_text(str(port))
        part.rename(file)
        return StoreAddress(host="127.0.0.1", port=port, listen_fd=listener.detach())
    limit = time.monotonic() + _MEET_S
    while not file.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"rank 0 did not write {file}")
        time.sleep(0.02)
    return StoreAddress(host="127.0.0.1", port=int(file.read_text()))


def make_trial(
    transport: str,
    ranks: int,
    *,
    collective_s: float = 20.0,
    bucket_mb: float = 25.0,
    **training: Any,
) -> Trial:
    """A tiny trial; `training` overrides values of its training."""
    values: dict[str, Any] = {
        "workload": "tiny", "model": "tiny-alexnet", "dataset": "none", "trust_dataset": False,
        "seed": 3, "image_size": 32, "global_batch": 10, "epochs": 4, "max_steps": None,
        "warmup_steps": 0, "learning_rate": 0.01, "momentum": 0.9, "dropout": True,
        "reading": "memory", "precision": "fp32", "memory_format": "contiguous",
    }  # fmt: skip
    return Trial(
        id="t",
        experiment="contract",
        repeat=0,
        launcher="mpi" if ranks > 1 else "local",
        transport=transport,
        local_strategy="processes" if ranks > 1 else "sequential",
        placement=Placement(nodes=1, ranks_per_node=ranks, threads_per_rank=1, oversubscribe=True),
        training=Training(**{**values, **training}),
        bucket_mb=bucket_mb,
        limits=Limits(rendezvous_s=_MEET_S, collective_s=collective_s),
    )
