"""Run by mpirun: sums the same gradients over many steps with every way to send less.

usage: compression.py TRANSPORT FOLDER

Rank r leaves `METHOD.r.safetensors`: `sum/STEP` of every step, `gradients`, and `dealt/STEP` where
the buckets were dealt out anew after the first step, as DistributedDataParallel does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context, make_trial

from paceline.train.rank.peers import join_peers
from paceline.train.transports.bucket_settings import GradientOptions
from paceline.train.transports.bucket_sums import FlatBucket, create_sum, pack

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"method": "bf16"},
    "fp16": {"method": "fp16"},
    "int8": {"method": "int8"},
    "topk": {"method": "topk", "numbers": {"density": 0.1}},
    "terngrad": {"method": "terngrad"},
    "powersgd": {"method": "powersgd", "numbers": {"rank": 2}},
}
SHAPES = [(30, 40), (30,), (5, 3, 3, 3), (1,), (61,)]
STEPS = 20
SMALL, ONE = 4 * 1300, 4 * 10**6  # bytes of a bucket: three uneven ones, or a single one


def gradients_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(*shape, generator=generator) for shape in SHAPES]


def total(sums: Any, buckets: list[FlatBucket], gradients: list[torch.Tensor]) -> torch.Tensor:
    """One step: the sum of all gradients over the ranks, flat."""
    rest = list(gradients)
    futures = []
    for bucket in buckets:
        count = len(bucket.gradients())
        bucket.fill(rest[:count])
        del rest[:count]
        futures.append(sums.start(bucket))
    for future in futures:
        future.wait()
    return torch.cat([bucket.buffer() for bucket in buckets])


def main() -> None:
    torch.set_num_threads(1)
    transport, folder = sys.argv[1], Path(sys.argv[2])
    context = make_context(folder)
    trial = make_trial(transport, context.world_size)
    peers = join_peers(context, trial)
    own = gradients_of(context.rank)
    if context.rank == context.world_size - 1:
        own[2].zero_()  # as where a rank's share is empty
    said = {}
    for name, settings in METHODS.items():
        in_flight = 1 if name == "none" else None
        options = GradientOptions(compression=settings or None, buckets_in_flight=in_flight)
        sums = create_sum(trial.model_copy(update={"transport_options": options}))
        buckets = pack(SHAPES, SMALL, torch.device("cpu"))
        left = {f"sum/{step}": total(sums, buckets, own) for step in range(STEPS)}
        said[name] = sums.describe()
        sums.close(failed=False)
        left["gradients"] = torch.cat([g.view(-1) for g in own])
        save_file(left, folder / f"{name}.{context.rank}.safetensors")
        dist.barrier()
    peers.leave(failed=False)
    (folder / f"said.{context.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
