"""Paceline beside plain DDP over Gloo and beside Horovod, on two hosts and in one run.

    python lab_libraries.py --out results/raw/lab_libraries.json --runs runs/libraries

Needs root: it makes the hosts, with one core each. AlexNet 224 x 224, 32 images per host. A round
runs bare_ddp.py with each library, then Paceline with each transport (`paceline run`), each in
fresh processes; ratios are those of one round. Horovod takes part where it is installed, with MPI:
HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 pip install --no-build-isolation FOLDER, from the source
of 0.28.1 with CMAKE_CXX_STANDARD 20 in its CMakeLists.txt (it says 14, and torch 2.13 needs more).
Nothing is read or checked by bare_ddp.py, so every difference of the loops counts against Paceline.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lab as lab_benchmark
from common import documented_parser, median_interval, paired_ratio, shown, write_results
from mpi_job import environment, mpirun
from paceline.measure.records.files import read_json
from paceline.runner.lab import INTERFACE, Lab, LabSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

BATCH = 32  # of each host
WARMUP_STEPS = 2
STEPS = {"full": 14, "1gbit": 10, "100mbit": 5}
TRANSPORTS = ("gloo", "mpi")


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR")
    parser.add_argument("--speeds", nargs="+", default=["1gbit", "100mbit"], choices=STEPS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=900, help="of one training")
    options = parser.parse_args()
    libraries = ["gloo"]
    if importlib.util.find_spec("horovod") is not None:
        libraries.append("horovod")
    else:
        print("Horovod is not installed: compared with plain DDP over Gloo only", file=sys.stderr)
    results = {}
    with Lab(LabSettings(hosts=2, cores=1), name="libraries") as lab:
        for speed in options.speeds:
            lab.shape(None if speed == lab_benchmark.FULL else speed)
            rates = measured(lab, speed, libraries, options)
            results[speed] = {"samples_per_s": rates, **concluded(speed, rates, libraries)}
    write_results(options.out, "lab_libraries", {"speeds": results})


def measured(
    lab: Lab, speed: str, libraries: Iterable[str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return samples per second of every round, by program."""
    rates: dict[str, list[float]] = {}
    for number in range(options.repeats):
        folder = options.runs.resolve() / f"{speed}-{number}"
        for library in libraries:
            words = ("--batch", BATCH, "--steps", STEPS[speed])
            step_s = bare(lab, library, words, folder / library, options.limit_s)
            rates.setdefault(f"bare {library}", []).append(2 * BATCH / step_s)
        for transport, rate in paceline(lab, speed, folder, options).items():
            rates.setdefault(f"paceline {transport}", []).append(rate)
    return rates


def bare(
    lab: Lab, library: str, given: Iterable[object], out: Path, limit_s: float, **settings: str
) -> float:
    """Run bare_ddp.py on both hosts; return its median step time in seconds.

    given: further arguments. settings: variables of the environment.
    """
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "HOROVOD_GLOO_IFACE": INTERFACE, **settings}
    script = Path(__file__).with_name("bare_ddp.py")
    words = ["--backend", library, *given, "--out", out]
    if library == "horovod":
        exported = [word for name in (*variables, "OMP_NUM_THREADS") for word in ("-x", name)]
        commands = [[
            mpirun(), "-n", 2, "--hostfile", lab.hostfile, "--bind-to", "none",
            "--mca", "btl", "tcp,self", *exported, sys.executable, script, *words,
        ]]  # fmt: skip
    else:
        commands = [
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", rank,
                "--nproc-per-node", 1, "--master-addr", lab.hosts[0].address,
                "--master-port", 29500, script, *words,
            ]
            for rank in range(2)
        ]  # fmt: skip
    processes = [
        subprocess.Popen(
            lab.hosts[rank].command(*command), env=environment(**variables),
            stdin=subprocess.DEVNULL, stdout=sys.stderr,
        )
        for rank, command in enumerate(commands)
    ]  # fmt: skip
    try:
        statuses = [process.wait(timeout=limit_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        raise SystemExit(f"lab_libraries.py: bare_ddp.py with {library} ended with {statuses}")
    ended = read_json(out / "rank0.json")["step_ended_unix_s"][WARMUP_STEPS - 1 :]
    times = [later - sooner for sooner, later in pairwise(ended)]
    return float(statistics.median(times))


def paceline(lab: Lab, speed: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run Paceline once with each transport; return samples per second by transport."""
    own = copy.copy(options)
    own.runs, own.repeats, own.steps = folder, 1, STEPS[speed]
    own.ways, own.factors = [("mpi", transport) for transport in TRANSPORTS], ["auto"]
    rows = lab_benchmark.run(lab, "alexnet", speed, own)["rows"]
    return {
        row["transport"]: row["samples_per_s"]["median"]
        for row in rows
        if row["launcher"] == "mpi" and row["samples_per_s"] is not None
    }


def concluded(
    speed: str, rates: dict[str, list[float]], libraries: Iterable[str]
) -> dict[str, Any]:
    """Print and return the rates, and Paceline's over those of each library."""
    for name, values in rates.items():
        shown(f"{speed} {name}", median_interval(values), "images/s")
    ratios = {
        f"paceline {transport} over {library}": paired_ratio(
            rates[f"paceline {transport}"], rates[f"bare {library}"]
        )
        for transport in TRANSPORTS
        for library in libraries
    }
    for name, ratio in ratios.items():
        shown(f"{speed} {name}", ratio)
    return {"ratios": ratios}


if __name__ == "__main__":
    main()
