"""Whether the CPU time of ranks, of the run and of the host say the same.

    python cpu_agreement.py --out results/raw/cpu_agreement.json [--repeats 3] [--steps 300]

The quickstart's workload on two ranks under every launcher, the host sampled every quarter of a
second, nothing else on the machine. Over the time in which all ranks train (from the first sample
after the last one's first step to the last before the first one's last): the CPU time of all ranks
by `ranks.jsonl`, and of the run and of the host by `trace.jsonl`. The host has more than the ranks:
the launcher, Spark's driver, the sidecar, the kernel's threads and whatever else there is.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from common import documented_parser, median_interval, shown, write_results
from paceline.analysis.trial.reading import load_trial, read_hosts, read_rank_samples
from paceline.analysis.trial.steps import read_steps
from paceline.plan.spec.loading import parse_spec
from paceline.plan.trials.planning import plan_trials
from paceline.train.data.catalogue import ensure_dataset
from training_ways import trained

if TYPE_CHECKING:
    from paceline.analysis.trial.reading import TrialRecord

RANKS = 2
BUSY = ("user", "system", "other")
SPEC = """
schema = 2
name = "cpu-agreement"
repeats = {repeats}
[training]
max_steps = {steps}
epochs = 1000
global_batch = 64
image_size = 128
[[workloads]]
name = "tiny"
data = "benchmark"
[telemetry]
interval_s = 0.25
{trials}
"""
TRIAL = """
[[trials]]
launcher = "{}"
transport = "{}"
local_strategy = "processes"
ranks_per_node = 2
"""
BASELINE = """
[[trials]]
launcher = "local"
local_strategy = "sequential"
"""
WAYS = (
    ("local", "shared"),
    ("torchrun", "gloo"),
    ("mpi", "mpi"),
    ("mpi", "gloo"),
    ("spark", "gloo"),
)


def main() -> None:
    options = arguments()
    trials = BASELINE + "".join(TRIAL.format(*way) for way in WAYS)
    data = ensure_dataset("tiny", images=192, seed=1)
    spec = parse_spec(
        SPEC.format(repeats=options.repeats, steps=options.steps, trials=trials),
        "cpu_agreement.py",
    )
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as temporary:
        for trial in plan_trials(spec, {"tiny": str(data)}, RANKS):
            files = trained(trial, Path(temporary))
            way = f"{trial.launcher}/{trial.transport}"
            found.setdefault(way, []).append(cpu_seconds(load_trial(files)))
            print(way, found[way][-1])
    results = {way: conclusion(rows) for way, rows in found.items()}
    for way, result in results.items():
        shown(f"{way}: ranks / host", result["ranks_to_host"])
        shown(f"{way}: run / host", result["run_to_host"])
    write_results(options.out, "cpu_agreement", {"ways": results})


def arguments() -> argparse.Namespace:
    parser = documented_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


def conclusion(rows: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "ranks_to_host": median_interval([row["ranks_s"] / row["host_s"] for row in rows]),
        "run_to_host": median_interval([row["run_s"] / row["host_s"] for row in rows]),
        "raw": rows,
    }


def cpu_seconds(record: TrialRecord) -> dict[str, float]:
    """CPU time of the ranks, the run and the host while all ranks trained."""
    (host,) = read_hosts(record.files)
    started_s = read_steps(record)["started_s"]  # shape (ranks, steps)
    training = pl.col("unix_s").is_between(started_s[:, 0].max(), started_s[:, -1].min())
    complete = (
        read_rank_samples(record.files.host(host.host))
        .filter(training)
        .group_by("unix_s")
        .agg(pl.col("cpu_seconds").sum(), pl.len())
        .filter(pl.col("len") == len(record.ranks))  # a rank is found within a second
        .join(host.samples, on="unix_s", suffix="_host")
        .sort("unix_s")
    )
    busy = [pl.col("cpu_seconds_host").struct.field(mode) for mode in BUSY]
    rises = complete.select(
        pl.col("unix_s").alias("seconds"),
        pl.col("cpu_seconds").alias("ranks_s"),
        pl.col("run_cpu_seconds").alias("run_s"),
        pl.sum_horizontal(busy).alias("host_s"),
    ).select(pl.all().last() - pl.all().first())
    return rises.row(0, named=True)


if __name__ == "__main__":
    main()
