"""Spark standalone and mpirun on two hosts at several speeds of the link between them.

    python lab.py --out results/lab.json --runs runs/lab        # needs root: it makes the hosts

The hosts are network namespaces of this machine with a core of their own each, their links token
buckets at both ends (`paceline lab`); "full" is as fast as this machine copies. One rank a host.
For every workload and speed a run of its own (`paceline run`, in RUNS/WORKLOAD-SPEED): the
sequential baseline on the first host, and each pair of launcher and transport, their repeats
interleaved. A run that is there is completed, not repeated. Spark's master and workers are up all
the time. On two cores, with quickstart and alexnet, all speeds and two repeats: about an hour.

The limit of a step. With two ranks each must send and receive all gradients once: n bytes take at
least 8 n / R seconds at R bit/s, for AlexNet's 228 MB 1.8 s at 1 Gbit/s and 18 s at 100 Mbit/s.
With factors of its two large linear layers (`sufficient_factors`) they are 12.7 MB: 0.1 s and
1.0 s. `--factors never` measures the former, `--factors auto never` both in one run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import documented_parser, write_results
from paceline.base.errors import PacelineError
from paceline.measure.records.files import read_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.tables import row_dicts
from paceline.runner.lab import INTERFACE, Lab, LabSettings, network, why_not
from paceline.runner.lab.record import namespaces_among

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FULL = "full"
SPEEDS = (FULL, "1gbit", "100mbit")
WAYS = (("mpi", "mpi"), ("mpi", "gloo"), ("spark", "mpi"), ("spark", "gloo"))


@dataclass(frozen=True)
class Workload:
    """What is trained, and for how many steps at each speed: those that are slow need fewer."""

    name: str
    images: int | None  # None: the task has its own
    settings: str
    warmup_steps: int
    steps: dict[str, int]
    sampling_s: float


_CONVOLUTIONAL = f"{Path(__file__).with_name('tasks.py').resolve()}:Convolutional"
# That of `paceline run quickstart`, the first paper's networks on fewer of its photos, and a
# network without large linear layers. Eight steps of `tiny` warm up, because Spark's JVM compiles
# during the first ones and takes the core of a rank.
WORKLOADS = {
    "quickstart": Workload(
        "tiny", 192, "image_size = 128\nglobal_batch = 64", 8, dict.fromkeys(SPEEDS, 28), 0.25
    ),
    "alexnet": Workload(
        "simple-big", 256, "global_batch = 64", 2, {FULL: 16, "1gbit": 12, "100mbit": 6}, 1.0
    ),
    "convolutional": Workload(
        "convolutional",
        None,
        f'task = "{_CONVOLUTIONAL}"\nglobal_batch = 32\nlearning_rate = 0.001',
        2,
        {FULL: 16, "1gbit": 16, "100mbit": 12},
        1.0,
    ),
    "vgg16": Workload("complex-small", 64, "global_batch = 16", 1, dict.fromkeys(SPEEDS, 5), 1.0),
}
SPEC = """
schema = 2
name = "lab-{name}-{speed}"
description = "two hosts with a core each, links: {speed}"
seed = 1
repeats = {repeats}
[[workloads]]
name = "{workload.name}"
{samples}{workload.settings}
max_steps = {steps}
epochs = {steps}
warmup_steps = {warmup_steps}
[[trials]]
launcher = "local"
local_strategy = "sequential"
{trials}
[network]
interface = "{interface}"
[mpi]
hostfile = "{hostfile}"
[spark]
master = "{master}"
[spark.conf]
"spark.scheduler.maxRegisteredResourcesWaitingTime" = "60s"
[telemetry]
interval_s = {workload.sampling_s}
[limits]
trial_s = 1800
rendezvous_s = 120
collective_s = 300
"""
TRIAL = """[[trials]]
launcher = "{}"
transport = "{}"
local_strategy = "sequential"
nodes = 2
sufficient_factors = "{}"
"""


def main() -> None:
    options = arguments()
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"lab.py: {reason}")
    started_s = time.monotonic()
    try:
        with Lab(LabSettings(hosts=2, cores=1, spark=True), name="bench") as lab:
            runs = [
                run(lab, name, speed, options)
                for name in options.workloads
                for speed in options.speeds
            ]
    except PacelineError as error:
        raise SystemExit(f"lab.py: {error}") from error
    left = namespaces_among(network.namespaces(), lab.record.name)
    print(f"left behind: {', '.join(left) or 'nothing'}")
    show(runs)
    results = {"seconds": time.monotonic() - started_s, "left_behind": left, "runs": runs}
    write_results(options.out, "lab", results)
    if left or not all(entry["traces_of_both_hosts"] for entry in runs):
        raise SystemExit("lab.py: something is left, or a host has no trace; see above")


def arguments() -> argparse.Namespace:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--runs", type=Path, required=True, metavar="DIR", help="run directories, reports in them"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=["quickstart", "alexnet"]
    )
    parser.add_argument(
        "--speeds", nargs="+", default=SPEEDS, metavar="SPEED", help=f"default: {' '.join(SPEEDS)}"
    )
    parser.add_argument(
        "--ways", nargs="+", type=way, default=WAYS, metavar="LAUNCHER/TRANSPORT",
        help=f"default: {' '.join('/'.join(pair) for pair in WAYS)}",
    )  # fmt: skip
    parser.add_argument(
        "--factors", nargs="+", choices=("auto", "always", "never"), default=["auto"]
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of every trial; default: by workload and speed")
    parser.add_argument("--limit-s", type=float, default=7200, help="of one run (default: 7200)")
    return parser.parse_args()


def way(text: str) -> tuple[str, str]:
    launcher, _, transport = text.partition("/")
    return launcher, transport


def run(lab: Lab, name: str, speed: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run of the workload at that speed, and what it found."""
    lab.shape(None if speed == FULL else speed)
    folder = (options.runs / f"{name}-{speed}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "spec.toml"
    spec.write_text(spec_text(lab, name, speed, options))
    began = RunFiles(folder / "run").manifest.exists()
    words = [sys.executable, "-m", "paceline.cli", "run"]
    words += ["--resume", folder / "run"] if began else [spec, "--out", folder / "run"]
    print(f"{name}, links {speed}:", file=sys.stderr)
    with (folder / "table.txt").open("w") as table:
        status = subprocess.run(
            lab.hosts[0].command(*words), stdout=table, check=False, timeout=options.limit_s
        ).returncode
    if status != 0:
        raise SystemExit(
            f"lab.py: {name} at {speed} ended with {status}; the same command goes on from there"
        )
    return {"workload": name, "speed": speed, **found(RunFiles(folder / "run"))}


def spec_text(lab: Lab, name: str, speed: str, options: argparse.Namespace) -> str:
    workload = WORKLOADS[name]
    steps = options.steps or workload.steps.get(speed, min(workload.steps.values()))
    return SPEC.format(
        name=name,
        speed=speed,
        repeats=options.repeats,
        workload=workload,
        samples="" if workload.images is None else f"samples = {workload.images}\n",
        steps=steps,
        warmup_steps=min(workload.warmup_steps, steps - 1),
        trials="".join(
            TRIAL.format(*pair, factors) for pair in options.ways for factors in options.factors
        ),
        interface=INTERFACE,
        hostfile=lab.hostfile,
        master=lab.spark_master if lab.record.settings.spark else "none",
    )


def found(files: RunFiles) -> dict[str, Any]:
    comparison = read_json(files.comparison)
    rows = comparison["rows"]
    trials = {name: traces(trial.hosts()) for name, trial in files.trials()}
    return {
        "rows": rows,
        "workloads": comparison["workloads"],
        "traces": trials,
        "traces_of_both_hosts": all(
            len(hosts) == (1 if ".local." in name else 2) for name, hosts in trials.items()
        ),
    }


def traces(hosts: Iterable[tuple[str, Any]]) -> dict[str, dict[str, float]]:
    """Samples of each host, and when its first and last were taken."""
    found = {}
    for host, files in hosts:
        times = [row["unix_s"] for row in row_dicts(files.trace) if "unix_s" in row]
        if times:
            found[host] = {
                "samples": len(times),
                "first_unix_s": times[0],
                "last_unix_s": times[-1],
            }
    return found


def show(runs: Sequence[dict[str, Any]]) -> None:
    """A table: what each way does at each speed."""
    head = f"{'workload':<11} {'link':<8} {'launcher':<9} {'transport':<9} {'factors':<7}"
    print(f"{head} {'images/s':>24} {'speedup':>8} {'s a step':>9}  equivalent")
    for entry in runs:
        for row in entry["rows"]:
            where = f"{entry['workload']:<11} {entry['speed']:<8}"
            way = f"{row['launcher']:<9} {row['transport']:<9}"
            factors = row["options"].get("sufficient_factors", "")
            print(f"{where} {way} {factors:<7} {figures(row)}")


def figures(row: dict[str, Any]) -> str:
    rate, step, speedup = row["samples_per_s"], row["step_s"], row["speedup"]
    if rate is None:
        return "not measured"
    interval = f"{rate['median']:.2f} [{rate['low']:.2f}, {rate['high']:.2f}]"
    ratio = "" if speedup is None else f"{speedup['median']:.3f}"
    return f"{interval:>24} {ratio:>8} {step['median']:>9.3f}  {row['equivalent']}"


if __name__ == "__main__":
    main()
