"""One rank of a plain script over back end "paceline"; reduces for ever, or to the end.

usage: shared_backend.py FOLDER RANK RANKS STEPS

Writes FOLDER/RANK.json: how it ended, when, and which sums were wrong. Ranks meet by a file.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.base.errors import PacelineError
from paceline.distributed import BACKEND


def reduce_all(rank: int, ranks: int, steps: int, groups: list[dist.ProcessGroup]) -> int:
    """Return the number of wrong sums: messages in flight in overlapping groups, of all sizes."""
    wrong = 0
    for step in range(steps):
        tensors = [torch.full((3 + 40_000 * (step % 2),), rank + 1.0) for _ in groups]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for tensor, group in zip(tensors, groups, strict=True)
        ]
        for work in reversed(works):
            work.wait()
        for tensor, group in zip(tensors, groups, strict=True):
            expected = sum(member + 1 for member in dist.get_process_group_ranks(group))
            wrong += int((tensor != expected).any())
        whole = torch.full((5,), float(rank))
        dist.all_reduce(whole)
        wrong += int(whole[0] != sum(range(ranks)))
    return wrong


def main() -> None:
    folder, rank, ranks, steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group(
        BACKEND, init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    pairs = [dist.new_group([a, (a + 1) % ranks]) for a in range(ranks)]
    own = [group for a, group in enumerate(pairs) if rank in (a, (a + 1) % ranks)]
    outcome = {"wrong": 0, "error": "", "lost": None}
    (folder / f"{rank}.ready").write_text(str(os.getpid()))
    try:
        outcome["wrong"] = reduce_all(rank, ranks, steps, own)
    except PacelineError as error:
        outcome.update(error=type(error).__name__, message=str(error))
    outcome["ended_unix_s"] = time.time()
    dist.destroy_process_group()
    outcome["threads"] = [each.name for each in threading.enumerate()]
    outcome["descriptors"] = [
        str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    ]
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    os._exit(0)  # what torch has left waiting for a dead peer is not the point here


main()
