"""Resamples a run with many repeats: false alarms, power and saved repeats of `repeats = "auto"`.

    paceline run quickstart --repeats 30 --out RUN_DIR
    python automatic_repeats.py RUN_DIR --out automatic_repeats.json

equal: two disjoint random samples of the repeats of one configuration are compared, as if they
were two configurations; a significant difference is a false alarm. different: the same, after one
of them was made faster. whole run: repeats of all configurations are drawn together, and the
decisions of the rule are compared with those of the fixed number of repeats.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import write_results
from paceline.analysis.between_runs.speeds import read_speeds
from paceline.analysis.statistics.intervals import CONFIDENCE
from paceline.analysis.statistics.looks import levels
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    Rates = dict[str, dict[int, RepeatRate]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The ranking that a table shows at the end of a run."""

    repeats: int
    best: str
    tied: frozenset[str]  # with the best
    is_decided: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--max-repeats", type=int, default=8)
    parser.add_argument("--tie-margin", type=float, default=0.05)
    parser.add_argument("--difference", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rates = read_speeds(RunFiles(options.run_dir)).rates
    few = {
        name: len(found) for name, found in rates.items() if len(found) < 2 * options.max_repeats
    }
    if few:
        raise SystemExit(
            f"{options.run_dir}: expected at least {2 * options.max_repeats} finished repeats of "
            f"each configuration, got {few}; run it with --repeats 30"
        )
    random = np.random.default_rng(options.seed)
    pairs = {name: pair_rates(found, options, random) for name, found in rates.items()}
    whole = whole_run(rates, options, random)
    print(f"{'configuration':<50} false alarms  found  repeats")
    for name, pair in pairs.items():
        print(
            f"{name:<50} {pair['false_alarms']:12.3f} {pair['found']:6.3f} "
            f"{pair['repeats_if_different']:8.2f}"
        )
    print(
        f"whole run: {whole['repeats']:.2f} of {options.max_repeats} repeats, best configuration "
        f"agrees in {whole['same_best_or_tie']:.3f}, decided in {whole['decided']:.3f}"
    )
    settings = {k: v for k, v in vars(options).items() if k not in ("run_dir", "out")}
    write_results(
        options.out, "automatic_repeats", {"options": settings, "pairs": pairs, "whole_run": whole}
    )


def pair_rates(
    repeats: Mapping[int, RepeatRate], options: argparse.Namespace, random: np.random.Generator
) -> dict[str, float]:
    """Return the shares of false alarms and of found differences, and the mean repeats."""
    shift = math.log1p(options.difference)
    alarms, found, equal_repeats, different_repeats = [], [], [], []
    for _ in range(options.draws):
        chosen = random.choice(sorted(repeats), 2 * options.max_repeats, replace=False)
        halves = np.split(chosen, 2)
        pair = {
            name: {place: repeats[number] for place, number in enumerate(half.tolist())}
            for name, half in zip("ab", halves, strict=True)
        }
        equal = stopped(pair, options)
        alarms.append(not equal.tied)
        equal_repeats.append(equal.repeats)
        different = stopped(pair | {"a": shifted(pair["a"], shift)}, options)
        found.append(different.best == "a" and not different.tied)
        different_repeats.append(different.repeats)
    return {
        "false_alarms": float(np.mean(alarms)),
        "found": float(np.mean(found)),
        "repeats_if_equal": float(np.mean(equal_repeats)),
        "repeats_if_different": float(np.mean(different_repeats)),
        "deviation": float(np.std([each.log_rate for each in repeats.values()], ddof=1)),
    }


def whole_run(
    rates: Rates, options: argparse.Namespace, random: np.random.Generator
) -> dict[str, Any]:
    """Compare the rule with the fixed number of repeats on the same draws."""
    common = sorted(set.intersection(*(set(found) for found in rates.values())))
    repeats, decided, agree, same_set = [], [], [], []
    for _ in range(options.draws):
        chosen = random.choice(common, options.max_repeats, replace=False).tolist()
        drawn = {
            name: {place: found[number] for place, number in enumerate(chosen)}
            for name, found in rates.items()
        }
        ours = stopped(drawn, options)
        fixed = decision(drawn, options.max_repeats, 1 - CONFIDENCE, is_decided=True)
        repeats.append(ours.repeats)
        decided.append(ours.is_decided)
        agree.append(ours.best in {fixed.best, *fixed.tied})
        same_set.append({ours.best, *ours.tied} == {fixed.best, *fixed.tied})
    return {
        "repeats": float(np.mean(repeats)),
        "decided": float(np.mean(decided)),
        "same_best_or_tie": float(np.mean(agree)),
        "same_set_of_fastest": float(np.mean(same_set)),
    }


def stopped(rates: Rates, options: argparse.Namespace) -> Decision:
    """Apply the rule of `repeats = "auto"`; return the ranking at its end."""
    for repeats, level in levels(options.max_repeats).items():
        known = {n: {r: s for r, s in found.items() if r < repeats} for n, found in rates.items()}
        shown = RunRates(known).fastest(level=level, margin=options.tie_margin)
        is_decided = not shown.undecided
        if is_decided or repeats == options.max_repeats:
            return decision(known, repeats, level, is_decided=is_decided)
    raise AssertionError("the last look returns")


def decision(rates: Rates, repeats: int, level: float, *, is_decided: bool) -> Decision:
    """Return the ranking of a table at this level."""
    shown = RunRates(rates).fastest(level=level)
    best, tied = shown.leader or "", frozenset(shown.not_separated)
    return Decision(repeats=repeats, best=best, tied=tied, is_decided=is_decided)


def shifted(repeats: Mapping[int, RepeatRate], by: float) -> dict[int, RepeatRate]:
    """Return the repeats of a configuration that is faster, on the logarithmic scale."""
    return {number: RepeatRate(log_rate=each.log_rate + by) for number, each in repeats.items()}


if __name__ == "__main__":
    main()
