"""Resamples a run with many repeats: how often are equal configurations told apart?

    paceline run quickstart --repeats 30 --out RUN_DIR
    python false_alarms.py RUN_DIR --out false_alarms.json

Each configuration is compared with itself: its repeats of one random draw with those of another
one. What all configurations share in a repeat is moved from the one draw to the other, because in a
run both would share it. An interval covers the truth, a ratio of 1, unless it is a false alarm.
found: the same, after one side was made faster.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from automatic_repeats import shifted
from common import write_results
from paceline.analysis.between_runs.speeds import read_speeds
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

COPY = "copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--repeats", type=int, nargs="+", default=[2, 3, 5, 10])
    parser.add_argument("--without", type=int, nargs="+", default=[], help="disturbed repeats")
    parser.add_argument("--difference", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rates = read_speeds(RunFiles(options.run_dir)).rates
    results = {str(count): resample(rates, count, options) for count in options.repeats}
    print("repeats  false alarms  coverage  found")
    for count, found in results.items():
        alarms = found["false_alarms"]
        print(f"{count:>7} {alarms:13.3f} {1 - alarms:9.3f} {found['found']:6.3f}")
    settings = {k: v for k, v in vars(options).items() if k not in ("run_dir", "out")}
    logs = {n: [found[r].log_rate for r in sorted(found)] for n, found in rates.items()}
    write_results(
        options.out,
        "false_alarms",
        {"options": settings, "results": results, "log_samples_per_s": logs},
    )


def resample(
    rates: Mapping[str, Mapping[int, RepeatRate]], count: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Compare each configuration with itself over `count` repeats."""
    random = np.random.default_rng(options.seed)
    common = set.intersection(*(set(found) for found in rates.values())) - set(options.without)
    shared = shared_effects(rates, sorted(common))
    alarms: dict[str, list[bool]] = {name: [] for name in rates}
    found: dict[str, list[bool]] = {name: [] for name in rates}
    for _ in range(options.draws):
        chosen = random.choice(sorted(common), 2 * count, replace=False).tolist()
        ours, theirs = chosen[:count], chosen[count:]
        drawn = {n: {i: of[r] for i, r in enumerate(ours)} for n, of in rates.items()}
        for name, repeats in rates.items():
            copy = {
                i: moved(repeats[there], shared[here] - shared[there])
                for i, (here, there) in enumerate(zip(ours, theirs, strict=True))
            }
            for list_, by in ((alarms, 0.0), (found, math.log1p(options.difference))):
                run = {**drawn, name: shifted(drawn[name], by), COPY: copy}
                interval = RunRates(run).ratio(name, COPY)
                if interval is not None:
                    list_[name].append(not interval.contains(1))
    return {
        "false_alarms": float(np.mean([*alarms.values()])),
        "found": float(np.mean([*found.values()])),
        "false_alarms_by_configuration": {n: float(np.mean(v)) for n, v in alarms.items()},
        "found_by_configuration": {n: float(np.mean(v)) for n, v in found.items()},
    }


def shared_effects(
    rates: Mapping[str, Mapping[int, RepeatRate]], repeats: list[int]
) -> dict[int, float]:
    """Return the median over configurations of the deviation of each repeat, as a logarithm."""
    logs = np.array([[found[repeat].log_rate for repeat in repeats] for found in rates.values()])
    effects = np.median(logs - np.median(logs, axis=1, keepdims=True), axis=0)
    return dict(zip(repeats, effects.tolist(), strict=True))


def moved(one: RepeatRate, by: float) -> RepeatRate:
    return RepeatRate(log_rate=one.log_rate + by)


if __name__ == "__main__":
    main()
