"""What the contract tests' programs share: who am I, where do we meet, what is the trial."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.support.trials import tiny_trial

from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.spec.models import Limits
from paceline.plan.trials.trial import RankContext, StoreAddress, Trial

_MEET_S = 30.0
CORES = sorted(os.sched_getaffinity(0))


def make_context(folder: Path, nodes: int = 1) -> RankContext:
    """Rank and size as mpirun says, also for Gloo; rank 0 leaves the store's port in `folder`.

    nodes: into how many the ranks of this machine are counted; they then share no memory.
    """
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    on_node = size // nodes
    return RankContext(
        rank=rank,
        world_size=size,
        local_rank=rank % on_node,
        ranks_on_node=on_node,
        node_index=rank // on_node,
        host=f"testhost{rank // on_node}",
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
        return StoreAddress(host="127.0.0.1", port=port, listen_fd=listener.detach(), secret="")
    limit = time.monotonic() + _MEET_S
    while not file.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"rank 0 did not write {file}")
        time.sleep(0.02)
    return StoreAddress(host="127.0.0.1", port=int(file.read_text()), secret="")


def make_trial(
    transport: str,
    ranks: int,
    *,
    nodes: int = 1,
    local_strategy: str | None = None,
    thread_replicas: int = 1,
    pipeline: dict[str, Any] | None = None,
    reduction: str | None = None,
    collective_s: float = 20.0,
    bucket_mb: float | None = None,
    sufficient_factors: str = "never",
    **training: Any,
) -> Trial:
    """A tiny trial on `ranks` ranks in all; `training` overrides values of its training."""
    options = dict(pipeline or {})
    stages = options.pop("stages", 1)
    if reduction is not None:
        options["reduction"] = reduction
    sends = bucket_mb is not None and TRANSPORTS.get(transport).sends_gradients
    sending = {"bucket_mb": bucket_mb, "sufficient_factors": sufficient_factors}
    return tiny_trial(
        {
            "nodes": nodes,
            "ranks_per_node": ranks // nodes,
            "threads_per_rank": thread_replicas,
            "stages": stages,
            "replicas_per_node": ranks // nodes // stages * thread_replicas,
            "oversubscribe": True,
        },
        {"global_batch": 10, "epochs": 4, **training},
        launcher="mpi" if ranks > 1 else "local",
        transport=transport,
        local_strategy=local_strategy or ("processes" if ranks > 1 else "sequential"),
        strategy_options=options,
        transport_options=sending if sends else {},
        limits=Limits(rendezvous_s=_MEET_S, collective_s=collective_s),
    )
