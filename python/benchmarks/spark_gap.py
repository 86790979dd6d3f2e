"""Splits Spark's distance to MPI into launch, scheduling and transport, from a finished run.

    paceline run python/benchmarks/spark_gap.toml --out RUN_DIR
    python spark_gap.py RUN_DIR --out spark_gap.json

launch: until the first step ends, against mpirun with the same transport, less the difference of
a step; not known for a transport that mpirun does not have. scheduling: what steps cost more under
Spark with the same transport (`mpi` inside the barrier stage against `mpirun`). transport: what
they cost more under Spark with another transport than `mpi`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import write_results
from paceline.analysis.compare.run import compare_run
from paceline.records.files import jsonable
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from paceline.analysis.compare.row import Row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    comparison = compare_run(RunFiles(options.run_dir))
    rows = [row for row in comparison.rows if row.step_s is not None]
    split = [split_of(row, rows) for row in rows if row.launcher == "spark"]
    print(f"{'Spark with':<34} {'launch s':>9} {'scheduling':>11} {'transport':>10}  s a step")
    for part in split:
        launch = "-" if part["launch_s"] is None else f"{part['launch_s']:.2f}"
        print(
            f"{part['configuration'].partition('.spark.')[2]:<34} {launch:>9} "
            f"{part['scheduling_s_per_step']:11.3f} {part['transport_s_per_step']:10.3f}"
        )
    write_results(
        options.out, "spark_gap", {"split": split, "rows": [jsonable(row) for row in rows]}
    )


def found(rows: list[Row], launcher: str, transport: str) -> Row:
    return next(r for r in rows if (r.launcher, r.transport) == (launcher, transport))


def split_of(row: Row, rows: list[Row]) -> dict[str, Any]:
    """Parts of the distance from `row`, a row of Spark, to mpirun with transport `mpi`."""
    reference, inside = found(rows, "mpi", "mpi"), found(rows, "spark", "mpi")
    return {
        "configuration": row.configuration,
        "launch_s": launch_s(row, rows),
        "scheduling_s_per_step": step_s(inside) - step_s(reference),
        "transport_s_per_step": step_s(row) - step_s(inside),
        "step_s": step_s(row),
        "reference_step_s": step_s(reference),
    }


def launch_s(row: Row, rows: list[Row]) -> float | None:
    """Return how much later the first step ends than under mpirun with the same transport, less
    the difference of a step; None without such a row."""
    peers = [r for r in rows if (r.launcher, r.transport) == ("mpi", row.transport)]
    if not peers:
        return None
    later_s = first_step_s(row) - first_step_s(peers[0])
    return later_s - (step_s(row) - step_s(peers[0]))


def first_step_s(row: Row) -> float:
    """From the launcher's call to the end of the first step."""
    if row.time_to_first_step_s is None:
        raise SystemExit(f"{row.configuration}: nobody knows when its first step ended")
    return row.time_to_first_step_s


def step_s(row: Row) -> float:
    if row.step_s is None:
        raise SystemExit(f"{row.configuration}: no step was measured")
    return row.step_s.median


if __name__ == "__main__":
    main()
