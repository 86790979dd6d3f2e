"""All-reduce between ranks of one host: MPI called from C, back ends mpi4py, paceline and gloo.

    python allreduce.py --out results/raw/allreduce.json [--mca mpi_yield_when_idle 1]

Rounds of the C program and of Python's ranks alternate, in fresh processes each. Within Python's
rounds, calls of the back ends alternate. Ratios are those of neighbouring rounds. The
cores must be idle: MPI's own call spins and becomes ten times slower otherwise, so the ratio to it
has no meaning. `copy`: all ranks copy the message in their own memory at the same time. `in_place`:
over `paceline`, with large tensors that the ranks share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from beside_load import IDLE, LOADS, burning
from common import median_interval, paired_ratio, shown, write_results
from mpi_job import mpirun, output_of

SIZES_BYTES = (
    8, 1_000, 10_000, 64_000, 100_000, 1_000_000, 25_000_000, 100_000_000, 256_000_000,
)  # fmt: skip
LIMIT_S = 300.0
_RANK = "--rank"


def main() -> None:
    if sys.argv[1:2] == [_RANK]:
        run_rank(int(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20, help="in a round")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_BYTES, help="bytes")
    parser.add_argument("--load", choices=LOADS, default=IDLE, help="see beside_load.py")
    parser.add_argument(
        "--mca", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="of Open MPI"
    )
    arguments = parser.parse_args()
    ranks = ["-n", arguments.ranks, "--map-by", ":oversubscribe", "--bind-to", "none"]
    mpi = [mpirun(), *ranks, "--mca", "btl", "self,sm"]
    for name, value in arguments.mca:
        mpi += ["--mca", name, value]
    results = {}
    with TemporaryDirectory() as folder, burning(arguments.load, seed=1):
        program = compiled(Path(folder))
        for size in arguments.sizes:
            rounds = []
            for _ in range(arguments.rounds):
                from_c = output_of([*mpi, program, size, arguments.calls], LIMIT_S)
                from_python = output_of(
                    [*mpi, sys.executable, "-m", "mpi4py", __file__, _RANK, size, arguments.calls],
                    LIMIT_S,
                )
                seconds = {"c": [float(line) for line in from_c.split()]}
                rounds.append({**seconds, **json.loads(from_python.splitlines()[-1])})
            results[str(size)] = {"rounds": rounds, **concluded(size, rounds)}
    found = {"ranks": arguments.ranks, "load": arguments.load, "bytes": results}
    write_results(arguments.out, "allreduce", found)


def compiled(folder: Path) -> Path:
    """The C program, by the compiler wrapper of the same MPI."""
    source, program = Path(__file__).with_name("c") / "allreduce.c", folder / "allreduce"
    output_of([mpirun().with_name("mpicc"), "-O2", "-o", program, source], LIMIT_S)
    return program


def concluded(size: int, rounds: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Print and return ratios of the medians of the rounds."""
    medians = {name: [statistics.median(r[name]) for r in rounds] for name in rounds[0]}
    for name, values in medians.items():
        shown(f"{size / 1e6:g} MB {name}", median_interval([v * 1e3 for v in values]), "ms")
    ratios: dict[str, dict[str, float] | None] = {
        "mpi_over_c": paired_ratio(medians["mpi"], medians["c"]),
        "gloo_over_mpi": paired_ratio(medians["gloo"], medians["mpi"]),
        "gloo_over_paceline": paired_ratio(medians["gloo"], medians["paceline"]),
        "paceline_over_copy": paired_ratio(medians["paceline"], medians["copy"]),
        "gloo_over_in_place": None,
    }
    if "in_place" in medians:
        ratios["gloo_over_in_place"] = paired_ratio(medians["gloo"], medians["in_place"])
    for name, ratio in ratios.items():
        if ratio is not None:
            shown(f"{size / 1e6:g} MB {name}", ratio, "x")
    return dict(ratios)


def run_rank(size: int, calls: int) -> None:
    """Rank 0 prints the seconds of every call."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch  # noqa: PLC0415  (the parent needs none of it, and must not join MPI)
    import torch.distributed as dist  # noqa: PLC0415

    import paceline.distributed  # noqa: PLC0415
    import paceline.mpi  # noqa: F401, PLC0415
    from paceline.collectives.in_place import LEAST_BYTES  # noqa: PLC0415
    from timed_groups import all_reduce, measure  # noqa: PLC0415

    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("mpi4py", timeout=limit)
    groups = {
        "mpi": dist.new_group(backend="mpi4py", timeout=limit),
        "paceline": dist.new_group(backend="paceline", timeout=limit),
        "gloo": dist.new_group(backend="gloo", timeout=limit),
    }
    operations = {name: all_reduce(group, size) for name, group in groups.items()}
    if size >= LEAST_BYTES:
        operations["in_place"] = all_reduce(groups["paceline"], size, in_place=True)
    timed = measure(operations, calls)
    seconds = {name: values.seconds for name, values in timed.items()}
    source, target = torch.ones(2, max(1, size // 4))
    seconds["copy"] = []
    for _ in range(calls):
        dist.barrier(groups["gloo"])
        started_s = time.perf_counter()
        target.copy_(source)
        seconds["copy"].append(time.perf_counter() - started_s)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
