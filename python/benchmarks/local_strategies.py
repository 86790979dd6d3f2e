"""Ratios between the local strategies of a finished run, with the raw step times.

paceline run lerat2022-local --out RUN_DIR
python local_strategies.py RUN_DIR --out local_strategies.json
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import shown, write_results
from paceline.analysis.compare.run import compare_run
from paceline.analysis.statistics.rates import RunRates
from paceline.records.files import jsonable
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.analysis.compare.result import Comparison
    from paceline.analysis.compare.row import Row
    from paceline.analysis.statistics.rates import RepeatRate

FLOAT_BYTES = 4
# weights, gradients, momentum
STATE = 3


@dataclass(frozen=True)
class Way:
    """Which row is meant, by what tells it from the others."""

    strategy: str
    precision: str = "fp32"
    transport: str | None = None
    balance: str | None = None

    def is_of(self, row: Row) -> bool:
        return (
            row.local_strategy == self.strategy
            and row.precision == self.precision
            and self.transport in (None, row.transport)
            and self.balance in (None, row.options.get("balance"))
        )


SEQUENTIAL = Way("sequential")
RATIOS = {
    **{
        f"{strategy} against sequential": (Way(strategy), SEQUENTIAL)
        for strategy in ("intraop", "threads", "hybrid")
    },
    "processes (shared) against sequential": (Way("processes", transport="shared"), SEQUENTIAL),
    "processes: shared against gloo": (
        Way("processes", transport="shared"),
        Way("processes", transport="gloo"),
    ),
    "pipeline (time) against sequential": (Way("pipeline", balance="time"), SEQUENTIAL),
    "pipeline: time against size": (
        Way("pipeline", balance="time"),
        Way("pipeline", balance="size"),
    ),
    **{
        f"{strategy} bf16 channels_last against sequential fp32": (
            Way(strategy, precision="bf16"),
            SEQUENTIAL,
        )
        for strategy in ("sequential", "intraop", "threads", "processes")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    comparison = compare_run(RunFiles(options.run_dir))
    results = {
        workload: {
            "ratios": ratios_of(comparison, workload),
            "memory": memory_of(comparison, workload),
            "step_s": step_times(comparison, workload),
        }
        for workload in comparison.workloads
    }
    results["comparison"] = comparison.to_json()
    write_results(options.out, "local_strategies", results)


def ratios_of(comparison: Comparison, workload: str) -> dict[str, Any]:
    """Images/s of the one over the other's, as `paceline compare` computes it."""
    print(workload)
    rows = comparison.rows_of(workload)
    images = RunRates({row.configuration: images_of(comparison, row) for row in rows})
    found: dict[str, Any] = {}
    for name, (ours, theirs) in RATIOS.items():
        pair = [[row for row in rows if way.is_of(row)] for way in (ours, theirs)]
        if not all(pair):
            continue
        over, under = (matching[0].configuration for matching in pair)
        ratio = images.ratio(over, under)
        if ratio is not None:
            found[name] = jsonable(ratio)
            shown(name, found[name], "x")
    return found


def images_of(comparison: Comparison, row: Row) -> Mapping[int, RepeatRate]:
    trials = comparison.trials[row.configuration]
    return {t.repeat: t.samples_per_s for t in trials if t.samples_per_s is not None}


def memory_of(comparison: Comparison, workload: str) -> dict[str, Any]:
    """Peaks in bytes, and what k replicas in threads may take: k times the model's state and the
    activations (all else that the sequential run takes), and a tenth."""
    rows = {r.local_strategy: r for r in comparison.rows_of(workload) if r.precision == "fp32"}
    if not {"sequential", "threads"} <= set(rows):
        return {}
    sequential, threads = rows["sequential"], rows["threads"]
    result = comparison.trials[sequential.configuration][0].record.result
    peak = sequential.memory_peak_bytes
    if result is None or peak is None:
        return {}
    state = STATE * FLOAT_BYTES * result.parameters
    bound = 1.1 * (threads.replicas * state + peak - state)
    found = {
        "model_state_bytes": state,
        "sequential_peak_bytes": peak,
        "threads_peak_bytes": threads.memory_peak_bytes,
        "threads_bound_bytes": bound,
    }
    print({name: f"{value / 2**20:.0f} MiB" for name, value in found.items() if value})
    return found


def step_times(comparison: Comparison, workload: str) -> dict[str, list[list[float]]]:
    """Seconds of every step, the warm-up included, by configuration and repeat."""
    return {
        row.configuration: [
            [round(float(s), 6) for s in trial.steps.time_s]
            for trial in comparison.trials[row.configuration]
        ]
        for row in comparison.rows_of(workload)
    }


if __name__ == "__main__":
    main()
