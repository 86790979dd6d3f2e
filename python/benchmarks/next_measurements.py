"""Does a proposed measurement reduce the expected loss of a decision as `recommend` says?

    paceline run quickstart --repeats 30 --out RUN_DIR
    python next_measurements.py RUN_DIR --out next_measurements.json

Each draw makes a decision whose truth is known: some configurations of the run, each shifted so
that its median over all repeats is that of a random speed. Some random repeats are what was
measured. If a measurement is proposed, another random repeat of that configuration is added.

stated: the expected loss of taking the first one, as `recommend` says it: before the measurement,
as expected after it, and after it. true: how far the first one lies above the best, in truth.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import write_results
from false_alarms import moved
from paceline.analysis.between_runs.speeds import read_speeds
from paceline.analysis.recommend.candidates import Candidate, with_noise
from paceline.analysis.recommend.next_measurement import expected_loss, next_measurement
from paceline.analysis.statistics.noise import CONFIDENCE, run_noise
from paceline.analysis.statistics.resampling import Series
from paceline.analysis.statistics.series import Interval, median_interval
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

Rates = dict[str, dict[int, Series]]


@dataclass(frozen=True)
class Draw:
    """Shares of the value, before and after the measurement that was proposed."""

    stated_before: float
    stated_expected: float
    stated_after: float
    true_before: float
    true_after: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--repeats", type=int, nargs="+", default=[2, 3, 5])
    parser.add_argument("--configurations", type=int, default=4, help="of each decision")
    parser.add_argument("--spread", type=float, default=0.03, help="of their true speeds")
    parser.add_argument("--without", type=int, nargs="+", default=[], help="disturbed repeats")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rates = read_speeds(RunFiles(options.run_dir)).rates
    results = {str(count): simulate(rates, count, options) for count in options.repeats}
    print("repeats  proposed  stated: before, expected, after  true: before, after")
    for count, found in results.items():
        shares = "  ".join(f"{100 * found[name]:.2f} %" for name in Draw.__annotations__)
        print(f"{count:>7} {found['proposed']:9.2f}  {shares}")
    settings = {k: v for k, v in vars(options).items() if k not in ("run_dir", "out")}
    write_results(options.out, "next_measurements", {"options": settings, "results": results})


def simulate(
    rates: Mapping[str, Mapping[int, Series]], count: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Make decisions from `count` repeats, and one more where it is proposed."""
    random = np.random.default_rng(options.seed)
    common = set.intersection(*(set(found) for found in rates.values())) - set(options.without)
    draws, choices = [], []
    for _ in range(options.draws):
        names = random.choice(sorted(rates), options.configurations, replace=False).tolist()
        truth = dict(zip(names, random.normal(0, options.spread, len(names)), strict=True))
        everything = {name: centred(rates[name], truth[name], sorted(common)) for name in names}
        chosen = random.choice(sorted(common), count + 1, replace=False).tolist()
        measured = {
            name: {r: found[r] for r in chosen[:count]} for name, found in everything.items()
        }
        candidates = ranked(measured)
        proposal = next_measurement(candidates, noise_of(measured))
        choices.append(loss_of(candidates, truth))
        if proposal is None or proposal.configuration is None:
            continue
        measured[proposal.configuration][chosen[count]] = everything[proposal.configuration][
            chosen[count]
        ]
        after = ranked(measured)
        draws.append(
            Draw(
                stated_before=proposal.loss_now,
                stated_expected=proposal.loss_now - proposal.gain,
                stated_after=expected_loss(after)[0],
                true_before=loss_of(candidates, truth),
                true_after=loss_of(after, truth),
            )
        )
    means = {
        name: float(np.mean([getattr(draw, name) for draw in draws]))
        for name in Draw.__annotations__
    }
    return {
        "proposed": len(draws) / options.draws,
        **means,
        "true_loss": float(np.mean(choices)),
        "within_3_percent": float(np.mean([loss <= math.log(1.03) for loss in choices])),
    }


def centred(found: Mapping[int, Series], log_rate: float, repeats: list[int]) -> dict[int, Series]:
    """Move all repeats, so that their median is `log_rate`."""
    median = float(np.median([found[repeat].log_median for repeat in repeats]))
    return {repeat: moved(found[repeat], log_rate - median) for repeat in repeats}


def ranked(rates: Rates) -> list[Candidate]:
    """Return what `recommend` would rank, best first."""
    noises = run_noise(rates)
    found = []
    for name, repeats in rates.items():
        rate = median_interval(repeats, noises.of(name))
        assert rate is not None, "there are repeats"
        value = Interval(median=1 / rate.median, low=1 / rate.high, high=1 / rate.low)
        candidate = Candidate(
            name=name, configuration=name, nodes=1, value=value, confidence=CONFIDENCE, reason=""
        )
        found.append(with_noise(candidate, repeats, noises.of(name)))
    return sorted(found, key=lambda each: each.value.median)


def noise_of(rates: Rates) -> float:
    pooled = run_noise(rates).pooled
    assert pooled is not None, "there are several repeats"
    return pooled.deviation


def loss_of(candidates: list[Candidate], truth: Mapping[str, float]) -> float:
    """Return how far the first one lies above the best, as a logarithm."""
    return max(truth.values()) - truth[candidates[0].name]


if __name__ == "__main__":
    main()
