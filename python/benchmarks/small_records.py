"""One million small records from Parquet: throughput, memory and data wait in mode `stream`.

    python small_records.py --out small_records.json [--records 1000000] [--repeats 3]

Each record has 16 float32 numbers and a label, in row groups of 16,384 records. A small network is
trained for as many steps as two epochs have, on one rank and on two. The same files come from the
local disk and from an S3 server on loopback, and a data set of 30 % of the records shows what
memory depends on. Both are larger than the two shuffle windows of 131,072 records of a rank.

The bound that is asserted: in the same number of steps, memory may grow by 32 bytes for each
further record of the data set, not by the records themselves (72 bytes each when decoded). Masks of
samples take a few bytes of them, and the C library keeps freed memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

import paceline
from common import median_interval, shown, write_results
from paceline.train.data.register import register

sys.path.insert(0, str(Path(__file__).parents[2]))  # the S3 server of the tests
from tests.support.s3 import CREDENTIALS, s3_server

if TYPE_CHECKING:
    from collections.abc import Mapping

NUMBERS = 16
CLASSES = 4
ROW_GROUP_ROWS = 16_384
FILE_ROW_GROUPS = 8
BYTES_PER_FURTHER_RECORD = 32
WARMUP_STEPS = 20
TASK = Path(__file__).with_name("tasks.py")


def main() -> None:
    options = arguments()
    os.environ |= CREDENTIALS
    with tempfile.TemporaryDirectory() as scratch, s3_server() as server:
        folder = Path(scratch)
        sizes = {"part": options.records * 3 // 10, "all": options.records}
        for name, records in sizes.items():
            make(folder / name, records)
        sources = {name: str(folder / name) for name in sizes}
        sources["s3"] = server.upload(folder / "all", "all")
        run = paceline.run(spec_of(sources, options), folder / "run")
        assert not run.failed, f"failed: {run.failed}"
        results = summary(run)
        files = sum(f.stat().st_size for f in (folder / "all").glob("*.parquet"))
    growth = check_memory(results, sizes["all"] - sizes["part"])
    if options.out is not None:
        write_results(
            options.out,
            "small_records",
            {"records": sizes, "bytes_of_files": files, "rss_growth_bytes": growth,
             "allowed_bytes_per_further_record": BYTES_PER_FURTHER_RECORD, "runs": results},
        )  # fmt: skip


def make(folder: Path, records: int) -> None:
    """Write the data set and its manifest. The label depends on the numbers."""
    folder.mkdir()
    random = np.random.default_rng(1)
    numbers = random.standard_normal((records, NUMBERS), dtype=np.float32)
    labels = (numbers[:, 0] > 0) * 2 + (numbers[:, 1] > 0)
    lists = pa.ListArray.from_arrays(
        np.arange(0, records * NUMBERS + 1, NUMBERS, dtype=np.int32), numbers.ravel()
    )
    table = pa.table({"numbers": lists, "label": labels.astype(np.int32)})
    rows = ROW_GROUP_ROWS * FILE_ROW_GROUPS
    for start in range(0, records, rows):
        pq.write_table(
            table.slice(start, rows),
            folder / f"part-{start // rows:03}.parquet",
            row_group_size=ROW_GROUP_ROWS,
        )
    register(folder)


def spec_of(sources: Mapping[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the spec: every source on one rank and on two."""
    return {
        "schema": 2,
        "name": "small-records",
        "repeats": options.repeats,
        "training": {"global_batch": options.global_batch, "epochs": 1000, "reading": "stream",
                     "max_steps": 2 * -(-options.records // options.global_batch),
                     "warmup_steps": WARMUP_STEPS, "learning_rate": 0.05},
        "telemetry": {"interval_s": 0.1},
        "workloads": [
            {"name": name, "task": f"{TASK}:Classify", "data": data}
            for name, data in sources.items()
        ],
        "trials": [
            {"launcher": "local", "local_strategy": "sequential"},
            {"launcher": "local", "local_strategy": "processes", "ranks_per_node": 2},
        ],
    }  # fmt: skip


def summary(run: paceline.Run) -> dict[str, Any]:
    """Return throughput, data wait per step and the largest memory of a rank by configuration."""
    results = {}
    rows = {row["configuration"]: row for row in run.rows()}
    for (name,), steps in run.steps().group_by("configuration", maintain_order=True):
        used = steps.filter(pl.col("step") >= WARMUP_STEPS)
        waits_us, steps_us = (1e6 * used[n].to_numpy() for n in ("data_wait_s", "step_s"))
        of_ranks = run.rank_trace().filter(pl.col("configuration") == name)
        peaks = of_ranks.group_by("trial", "rank").agg(pl.col("rss_bytes").max())
        row = rows[str(name)]
        assert row["equivalent"], f"{name}: {row['equivalence_reason']}"
        results[str(name)] = {
            "samples_per_s": row["samples_per_s"],
            "step_us": float(np.median(steps_us)),
            "data_wait_us": {"median": float(np.median(waits_us)),
                             "p95": float(np.quantile(waits_us, 0.95)),
                             "share": float(waits_us.sum() / steps_us.sum())},
            "rss_bytes_by_rank": peaks["rss_bytes"].to_list(),
            "final_loss": row["final_loss"],
            "phases_s": row["phases_s"],
        }  # fmt: skip
        shown(f"{name}: samples/s", row["samples_per_s"])
        wait = results[str(name)]["data_wait_us"]
        print(f"    data wait per step {wait['median']:.0f} us, p95 {wait['p95']:.0f} us")
        shown("    RSS of a rank", median_interval([b / 2**20 for b in peaks["rss_bytes"]]), "MiB")
    return results


def check_memory(results: Mapping[str, Any], further: int) -> dict[str, float]:
    """Assert the bound; return the growth of a rank's memory by strategy, in bytes."""
    growth = {}
    for name, found in results.items():
        if not name.startswith("all."):
            continue
        less = results["part." + name.removeprefix("all.")]
        medians = [float(np.median(r["rss_bytes_by_rank"])) for r in (found, less)]
        growth[name] = medians[0] - medians[1]
        allowed = BYTES_PER_FURTHER_RECORD * further
        print(f"{name}: {growth[name] / 2**20:.1f} MiB more, {allowed / 2**20:.1f} MiB allowed")
        assert growth[name] <= allowed, f"{name}: memory grows with the records"
    return growth


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--global-batch", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
