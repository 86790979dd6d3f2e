"""Speed of an unchanged DDP training over back end paceline and over Gloo, from a finished run.

paceline run python/benchmarks/back_ends.toml --out RUN_DIR
python back_ends.py RUN_DIR --out back_ends.json
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from common import median_interval, paired_ratio, write_results
from paceline.analysis.between_runs.speeds import RunSpeeds, read_speeds
from paceline.measure.records.layout import RunFiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    speeds = read_speeds(RunFiles(options.run_dir))
    found = {workload: ratio_of(workload, speeds) for workload in speeds.workloads}
    for workload, each in found.items():
        ratio = each["paceline_over_gloo"]
        print(f"{workload}: {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]")
    write_results(options.out, "back_ends", {"workloads": found})


def ratio_of(workload: str, speeds: RunSpeeds) -> dict[str, Any]:
    """Return samples/s over each back end, and their ratio within the repeats that both have."""
    rates = {
        trial.transport: speeds.rates[name]
        for name, trial in speeds.trials.items()
        if trial.training.workload == workload and trial.launcher == "torchrun"
    }
    common = sorted(set(rates["gloo"]) & set(rates["paceline"]))
    raw = {t: [math.exp(rates[t][repeat].log_rate) for repeat in common] for t in rates}
    equivalent = [
        speeds.equivalent[name]
        for name, trial in speeds.trials.items()
        if trial.training.workload == workload and trial.transport == "paceline"
    ]
    return {
        **{transport: median_interval(values) for transport, values in raw.items()},
        "paceline_over_gloo": paired_ratio(raw["paceline"], raw["gloo"]),
        "equivalent": all(equivalent),
        "samples_per_s": raw,
    }


if __name__ == "__main__":
    main()
