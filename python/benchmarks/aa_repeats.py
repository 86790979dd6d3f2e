"""Compare configurations with themselves: how often does a run with real noise raise a false alarm?

    paceline run aa_repeats.toml --out RUN_DIR
    python aa_repeats.py RUN_DIR --out aa_repeats.json

A file with `log_samples_per_s` can stand in place of RUN_DIR. All numbers come from random draws of
the measured repeats, without replacement:

- pairs: the repeats of one draw of a configuration against those of another draw, beside the other
  configurations. What all configurations share in a repeat is moved along, because in a run both
  would share it. A false alarm is a 95 % interval that does not include the ratio of 1.
- families: the repeats of one configuration are dealt to as many equal ones as possible. A false
  alarm is a run that separates any of them from the fastest.
- two runs: two draws of all repeats are compared as two runs. A false alarm is a run in which any
  configuration differs; too_slow: a gate of 3 % that fails.
- gate: the same for one configuration alone, as with one script, by configuration; slower: the gate
  fails after the later draw was made 10 % slower.
- found: the same pairs, after one side was made faster.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import write_results
from paceline.analysis.between_runs.speeds import read_speeds
from paceline.analysis.between_runs.two_runs import paired_differences
from paceline.analysis.statistics.fastest import differing
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.measure.records.layout import RunFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.analysis.statistics.model import Belief

    Values = NDArray[np.float64]

LIMIT = 0.03  # of the gate
SLOWER = 0.1  # step time / step time of the same configuration - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="RUN_DIR, or a file with log_samples_per_s")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--repeats", type=int, nargs="+", default=[2, 3, 5, 10])
    parser.add_argument("--difference", type=float, default=0.05, help="that `found` is about")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logs = log_speeds(options.source)
    table = np.array(list(logs.values()))
    table = table[:, ~np.isnan(table).any(axis=0)]  # only repeats that all have
    if table.shape[1] < 2 * max(options.repeats):
        raise SystemExit(
            f"{options.source}: expected {2 * max(options.repeats)} repeats that every "
            f"configuration finished, got {table.shape[1]}; give fewer --repeats, or measure more"
        )
    results = {str(count): resample(table, count, options) for count in options.repeats}
    print("repeats  pairs  family  two runs  gate  found")
    for count, each in results.items():
        print(
            f"{count:>7} {each['pairs']:6.3f} {each['families']:7.3f} {each['two_runs']:9.3f} "
            f"{each['too_slow']:5.3f} {each['found']:6.3f}"
        )
    settings = {k: v for k, v in vars(options).items() if k not in ("source", "out")}
    deviations = dict(zip(logs, np.std(table, axis=1, ddof=1).round(4).tolist(), strict=True))
    write_results(
        options.out,
        "aa_repeats",
        {
            "options": settings,
            "results": results,
            "deviations": deviations,
            "log_samples_per_s": logs,
        },
    )


def log_speeds(source: Path) -> dict[str, list[float]]:
    """Return the logarithms of samples/s by configuration, in the order of the repeats."""
    if source.is_file():
        found: dict[str, list[float]] = json.loads(source.read_text())["log_samples_per_s"]
        return found
    rates = read_speeds(RunFiles(source)).rates
    every = sorted({repeat for found in rates.values() for repeat in found})
    return {
        name: [found[r].log_rate if r in found else math.nan for r in every]
        for name, found in rates.items()
    }


def resample(logs: Values, repeats: int, options: argparse.Namespace) -> dict[str, Any]:
    """Count false alarms over random draws. logs: shape (configurations, repeats)."""
    random = np.random.default_rng([options.seed, repeats])
    shared = np.median(logs - np.median(logs, axis=1, keepdims=True), axis=0)
    pairs, found, differs, too_slow, gate, slower = [], [], [], [], [], []
    for _ in range(options.draws):
        chosen = random.choice(logs.shape[1], 2 * repeats, replace=False)
        ours, theirs = chosen[:repeats], chosen[repeats:]
        pairs.append(pair_alarms(logs, shared, ours, theirs, 0.0))
        found.append(pair_alarms(logs, shared, ours, theirs, math.log1p(options.difference)))
        differences = two_runs(logs[:, ours], logs[:, theirs])
        differs.append(bool(rejected(differences)))
        too_slow.append(fails(differences))
        gate.append([fails([each]) for each in differences])
        slower.append([fails([each], math.log1p(SLOWER)) for each in differences])
    dealt = [
        bool(rates_of(family(own, repeats, random)).fastest().separated)
        for own in logs - shared
        for _ in range(max(options.draws // len(logs), 1))
    ]
    return {
        "pairs": rounded(pairs),
        "pairs_by_configuration": np.mean(pairs, axis=0).round(3).tolist(),
        "families": rounded(dealt),
        "two_runs": rounded(differs),
        "too_slow": rounded(too_slow),
        "found": rounded(found),
        "gate": np.mean(gate, axis=0).round(3).tolist(),
        "slower": np.mean(slower, axis=0).round(3).tolist(),
    }


def pair_alarms(
    logs: Values, shared: Values, ours: NDArray[np.int64], theirs: NDArray[np.int64], faster: float
) -> list[bool]:
    """Return for each configuration whether its interval against itself misses the ratio of 1."""
    alarms = []
    for index, own in enumerate(logs):
        copy = own[theirs] - shared[theirs] + shared[ours] + faster
        rates = rates_of(np.vstack([logs[:, ours], copy]))
        ratio = rates.log_ratio(str(index), str(len(logs)))
        alarms.append(ratio is not None and not ratio.low <= 0.0 <= ratio.high)
    return alarms


def rates_of(logs: Values) -> RunRates:
    return RunRates(
        {
            str(name): {n: RepeatRate(log_rate=float(value)) for n, value in enumerate(row)}
            for name, row in enumerate(logs)
        }
    )


def two_runs(before: Values, after: Values) -> list[Belief]:
    """Return the differences of all configurations between two runs."""
    return list(paired_differences(rates_of(before), rates_of(after)).values())


def rejected(differences: list[Belief], ratio: float = 0.0) -> set[str]:
    return differing({str(number): each for number, each in enumerate(differences)}, ratio)


def fails(differences: list[Belief], slower: float = 0.0) -> bool:
    """Return whether the gate fails for any, after the later run was made slower."""
    limit = math.log1p(-LIMIT) + slower
    too_slow = rejected(differences, limit)
    return any(differences[int(number)].value < limit for number in too_slow)


def family(repeats_of_one: Values, repeats: int, random: np.random.Generator) -> Values:
    """Deal the repeats of one configuration to as many equal ones as there are repeats for."""
    size = len(repeats_of_one) // repeats
    order = random.permutation(len(repeats_of_one))[: size * repeats]
    dealt: Values = repeats_of_one[order].reshape(size, repeats)
    return dealt


def rounded(values: list[Any]) -> float:
    return round(float(np.mean(values)), 4)


if __name__ == "__main__":
    main()
