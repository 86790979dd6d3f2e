"""Collective operations of back ends paceline and gloo on one host, and what they should keep.

    python self_consistency.py --ranks 4 --out results/raw/self_consistency.json

A special operation should not take longer than general ones that have the same result, as
all-reduce and reduce with broadcast (Träff, Gropp, Thakur: "Self-consistent MPI performance
requirements", IEEE TPDS 21(5), 2010, section 3). Sizes are those of the whole message: what all
ranks have after a broadcast or an all-gather, and before a reduction. In each round, all
operations of both back ends are called in turn, and a rule's ratio is taken in each round.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from common import documented_parser, median_interval, paired_ratio, shown, write_results
from mpi_job import mpirun, output_of

SIZES_BYTES = (64, 1_024, 16_384, 65_536, 1_048_576, 4_194_304, 25_165_824)
BACK_ENDS = ("paceline", "gloo")
# operation -> operations that have the same result, or more
RULES = (
    ("all_reduce", ("reduce", "broadcast")),
    ("all_reduce", ("reduce_scatter", "all_gather")),
    ("reduce", ("all_reduce",)),
    ("reduce", ("reduce_scatter", "gather")),
    ("reduce_scatter", ("reduce", "scatter")),
    ("broadcast", ("scatter", "all_gather")),
    ("all_gather", ("gather", "broadcast")),
    ("gather", ("all_gather",)),
    ("scatter", ("broadcast",)),
)
LIMIT_S = 600.0
_RANK = "--rank"


def main() -> None:
    if sys.argv[1:2] == [_RANK]:
        run_rank(int(sys.argv[2]))
        return
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=30)
    arguments = parser.parse_args()
    # With more ranks than cores, a barrier that spins would keep the others from their work.
    mpi = [mpirun(), "-n", arguments.ranks, "--oversubscribe", "--bind-to", "none"]
    mpi += ["--mca", "btl", "self,sm", "--mca", "mpi_yield_when_idle", "1"]
    command = [*mpi, sys.executable, "-m", "mpi4py", __file__, _RANK, arguments.calls]
    seconds = json.loads(output_of(command, LIMIT_S).splitlines()[-1])
    found = {size: concluded(int(size), by_name) for size, by_name in seconds.items()}
    results = {"ranks": arguments.ranks, "bytes": found, "seconds": seconds}
    write_results(arguments.out, "self_consistency", results)


def concluded(size: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Print and return medians by operation, and the ratio of each rule."""
    found: dict[str, Any] = {"milliseconds": {}, "rules": {}}
    for name, values in seconds.items():
        found["milliseconds"][name] = median_interval([1e3 * value for value in values])
        shown(f"{size} B {name}", found["milliseconds"][name], "ms")
    for back_end in BACK_ENDS:
        for special, general in RULES:
            parts = zip(*(seconds[f"{back_end} {name}"] for name in general), strict=True)
            ratio = paired_ratio(seconds[f"{back_end} {special}"], [sum(each) for each in parts])
            rule = f"{back_end} {special} / {' + '.join(general)}"
            found["rules"][rule] = ratio
            shown(f"{size} B {rule}", ratio, "x")
    return found


def run_rank(calls: int) -> None:
    """Rank 0 prints the seconds of every call."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch  # noqa: PLC0415  (the parent needs none of it, and must not join MPI)
    import torch.distributed as dist  # noqa: PLC0415

    import paceline.distributed  # noqa: PLC0415
    import paceline.mpi  # noqa: F401, PLC0415
    from timed_groups import Operation, all_reduce, measure  # noqa: PLC0415

    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("mpi4py", timeout=limit)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def operations(group: dist.ProcessGroup, size: int) -> dict[str, Operation]:
        whole, part = torch.empty(size // 4), torch.empty(size // 4 // ranks)
        first, none = rank == 0, torch.empty(0)
        parts = list(whole.chunk(ranks)) if first else None
        total, one_on_first = float(ranks), 1.0 if first else None
        reduce = partial(dist.reduce, whole, 0, group=group)
        broadcast = partial(dist.broadcast, whole, 0, group=group)
        scatter_sums = partial(dist.reduce_scatter_tensor, part, whole, group=group)
        gather_all = partial(dist.all_gather_into_tensor, whole, part, group=group)
        gather = partial(dist.gather, part, parts, 0, group=group)
        scatter = partial(dist.scatter, part, parts, 0, group=group)
        return {
            "all_reduce": all_reduce(group, size),
            "reduce": Operation(reduce, whole, whole, total if first else None),
            "broadcast": Operation(broadcast, whole if first else none, whole, 1.0),
            "reduce_scatter": Operation(scatter_sums, whole, part, total),
            "all_gather": Operation(gather_all, part, whole, 1.0),
            "gather": Operation(gather, part, whole, one_on_first),
            "scatter": Operation(scatter, whole, part, 1.0),
        }

    groups = {name: dist.new_group(backend=name, timeout=limit) for name in BACK_ENDS}
    seconds: dict[int, dict[str, list[float]]] = {}
    for size in SIZES_BYTES:
        every = {
            f"{back_end} {name}": operation
            for back_end, group in groups.items()
            for name, operation in operations(group, size).items()
        }
        seconds[size] = {name: timed.seconds for name, timed in measure(every, calls).items()}
    if rank == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
