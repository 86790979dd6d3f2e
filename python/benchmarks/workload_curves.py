"""The comparison of a finished run, with the curve of each metric in the first repeat.

paceline run workloads --out RUN_DIR
python workload_curves.py RUN_DIR --out workloads_curves.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import polars as pl

import paceline
from common import write_results

Curves = dict[str, dict[str, dict[int, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    run = paceline.load(options.run_dir)
    results = {**run.comparison.to_json(), "curves": curves(run)}
    write_results(options.out, "workloads_curves", results)


def curves(run: paceline.Run) -> Curves:
    """Return the values by configuration, metric and number of steps."""
    found: Curves = {}
    for row in run.evaluations().filter(pl.col("repeat") == 0).iter_rows(named=True):
        by_metric = found.setdefault(row["configuration"], {})
        by_metric.setdefault(row["metric"], {})[row["steps"]] = row["value"]
    return found


if __name__ == "__main__":
    main()
