"""Simulate runs whose truth is known: how often are intervals and verdicts wrong, and their power?

    python statistics_study.py --out statistics.json [--runs 500]

Everything is seeded.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy

from common import write_results
from paceline.analysis.statistics.fastest import find_fastest
from paceline.analysis.statistics.intervals import (
    FIRST_LOOK,
    Estimate,
    levels,
    mean_interval,
    single_trial_log_mean,
    welch_difference,
)
from paceline.analysis.statistics.layout import fit_layout, log_ratio, log_speed

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from paceline.analysis.statistics.layout import Layout

    Values = NDArray[np.float64]

REPEATS = (2, 3, 5, 10)
SIZES = (2, 9, 20)
STEPS = 40
STEP_NOISE, RUN_NOISE, SHARED_NOISE = 0.1, 0.015, 0.02
AHEAD = 0.06  # of the leader, where power is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Disturbances of the repeats of a simulated run."""

    correlation: float = 0.0  # of consecutive steps
    drift: float = 0.0  # of the machine from the first to the last repeat
    deviations: tuple[float, ...] = ()  # of the first configurations, instead of RUN_NOISE
    others: float = RUN_NOISE
    outlier: float = 0.0  # by which a trial of the second configuration is slower


NOISES = {
    "independent steps": Noise(),
    "autocorrelated steps, 0.5": Noise(correlation=0.5),
    "autocorrelated steps, 0.8": Noise(correlation=0.8),
    "drifting repeats, 20 %": Noise(drift=0.2),
    "first 8 %, others 2 %": Noise(deviations=(0.08,), others=0.02),
    "one outlier, 20 %": Noise(outlier=0.2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin, runs = time.monotonic(), options.runs
    results: dict[str, Any] = {
        "variances": compare_rules(runs, options.seed),
        "grid": grid(runs, options.seed),
        "steps_of_one_trial": single_trials(5 * runs, options.seed),
        "two_runs": two_runs(5 * runs, options.seed),
        "automatic_repeats": automatic(runs // 2, options.seed),
    }
    results["seconds"] = round(time.monotonic() - begin, 1)
    write_results(
        options.out,
        "statistics_study",
        {"runs": runs, "seed": options.seed, "results": results},
    )


def simulate_steps(
    noise: Noise, shape: tuple[int, ...], random: np.random.Generator
) -> NDArray[np.float64]:
    """Return seconds of consecutive steps, relative to the truth, shape (*shape, STEPS)."""
    innovations = random.standard_normal(shape)
    series = np.empty(shape)
    series[..., 0] = innovations[..., 0]
    rho = noise.correlation
    for step in range(1, shape[-1]):
        fresh = np.sqrt(1 - rho**2) * innovations[..., step]
        series[..., step] = rho * series[..., step - 1] + fresh
    seconds: Values = np.exp(STEP_NOISE * series - STEP_NOISE**2 / 2)
    return seconds


def simulate_run(
    noise: Noise, configurations: int, repeats: int, random: np.random.Generator
) -> Values:
    """Return logarithms of speeds of equal configurations, shape (configurations, repeats)."""
    shape = configurations, repeats
    steps = simulate_steps(noise, (*shape, STEPS), random)
    deviations = np.full((configurations, 1), noise.others)
    deviations[: len(noise.deviations), 0] = noise.deviations
    logs: Values = -np.log(steps.mean(axis=-1)) + deviations * random.standard_normal(shape)
    logs = logs + SHARED_NOISE * random.standard_normal(repeats)
    if noise.drift:
        # the configurations of a repeat run one after another, in random order
        order = random.permuted(np.tile(np.arange(configurations), (repeats, 1)), axis=1).T
        place = (np.arange(repeats)[None, :] * configurations + order) / (configurations * repeats)
        logs = logs - noise.drift * (place - 0.5)
    if noise.outlier:
        logs[min(1, configurations - 1), random.integers(repeats)] += np.log1p(-noise.outlier)
    return logs


def grid(runs: int, seed: int) -> list[dict[str, Any]]:
    """Return coverage, family-wise error and power by noise, repeats and configurations."""
    rows = []
    for number, (name, noise) in enumerate(NOISES.items()):
        for configurations in SIZES:
            for repeats in REPEATS:
                random = np.random.default_rng([seed, number, configurations, repeats])
                count = runs if configurations < 20 else runs // 2
                row = measure(noise, configurations, repeats, count, random)
                rows.append(
                    {"noise": name, "configurations": configurations, "repeats": repeats, **row}
                )
                print(rows[-1], flush=True)
    return rows


def measure(
    noise: Noise, configurations: int, repeats: int, runs: int, random: np.random.Generator
) -> dict[str, float]:
    """Measure one cell of the grid. With unequal noise the ratios are those to the noisy one."""
    covered, of_speeds, alarms, found = [], [], [], []
    for number in range(runs):
        logs = simulate_run(noise, configurations, repeats, random)
        layout = fit_layout(logs)
        covered += ratios_cover(layout)
        of_speeds += [speed_covers(layout, index) for index in range(configurations)]
        alarms.append(bool(find_fastest(layout).separated))
        if number % 4 == 0:
            logs[-1] += np.log1p(AHEAD)
            places = find_fastest(fit_layout(logs)).places
            found += [place.is_separated for place in places[:-1]]
    return {
        "runs": runs,
        "ratio_coverage": rounded(covered),
        "speed_coverage": rounded(of_speeds),
        "false_separations": rounded(alarms),
        "power": rounded(found),
    }


def ratios_cover(layout: Layout, reference: int = 0) -> list[bool]:
    """Tell of each ratio of equal configurations whether its interval includes 1."""
    others = [index for index in range(len(layout.log_means)) if index != reference]
    found = [log_ratio(layout, index, reference) for index in others]
    return [each is not None and each.contains(0.0) for each in found]


def speed_covers(layout: Layout, index: int) -> bool:
    found = log_speed(layout, index)
    return found is not None and found.contains(0.0)


def rounded(values: list[bool]) -> float:
    return round(float(np.mean(values)), 4)


def own(layout: Layout) -> Layout:
    everyone = np.ones(len(layout.log_means))
    return replace(layout, has_own=everyone > 0, noisier=everyone)


def pooled(layout: Layout) -> Layout:
    nobody = np.zeros(len(layout.log_means))
    return replace(layout, has_own=nobody > 0, noisier=nobody)


def outliers(layout: Layout) -> Layout:
    """Give configurations their own variance after a test at 5 %, everywhere."""
    limit = scipy.special.fdtri(layout.own_degrees, layout.degrees, 0.95)
    is_noisier = layout.own_variances > limit * layout.variance
    return replace(layout, has_own=is_noisier, noisier=is_noisier.astype(float))


def moderated(layout: Layout) -> Layout:
    """Move the variance of each towards that of all (Smyth 2004)."""
    free = layout.own_degrees
    logs = np.log(np.maximum(layout.own_variances, 1e-12))
    logs = logs - scipy.special.digamma(free / 2) + np.log(free / 2)
    excess = np.var(logs, ddof=1) - np.mean(scipy.special.polygamma(1, free / 2))
    prior = np.inf if excess <= 0 else float(2 * _inverse_trigamma(excess))
    prior = min(prior, 1e3)
    centre = np.exp(np.mean(logs) + scipy.special.digamma(prior / 2) - np.log(prior / 2))
    variances = (prior * centre + free * layout.own_variances) / (prior + free)
    everyone = np.ones(len(free))
    return replace(
        layout,
        own_variances=variances,
        own_degrees=prior + free,
        has_own=everyone > 0,
        noisier=everyone,
    )


def _inverse_trigamma(value: float) -> float:
    return float(scipy.optimize.brentq(lambda x: scipy.special.polygamma(1, x) - value, 1e-3, 1e6))


RULES: dict[str, Callable[[Layout], Layout]] = {
    "own": own,
    "pooled": pooled,
    "moderated": moderated,
    "outlier test, 5 %": outliers,
    "chosen": lambda layout: layout,
}


def compare_rules(runs: int, seed: int) -> dict[str, Any]:
    """Compare rules for the variance where they differ most."""
    noisy = (0.08, *(0.02,) * 8)
    found: dict[str, Any] = {}
    for name, rule in RULES.items():
        random = np.random.default_rng(seed)
        few = nulls(noisy, 3, runs, rule, random)
        more = nulls(noisy, 5, runs // 2, rule, random)
        equal = nulls((0.02,) * 9, 3, runs, rule, random)
        twenty = separations((0.02,) * 20, 3, 0.08, runs // 4, rule, random)
        nine = separations((0.015,) * 9, 5, 0.05, runs // 2, rule, random)
        found[name] = {
            "noisy_3_repeats": few,
            "noisy_5_repeats": more,
            "equal_3_repeats": equal,
            "leader_8_of_20_median_separated": float(np.median(twenty)),
            "leader_5_of_9_all_separated": float(np.mean(np.array(nine) == 8)),
        }
        print(name, found[name], flush=True)
    return found


def plain_run(deviations: tuple[float, ...], repeats: int, random: np.random.Generator) -> Values:
    logs: Values = np.array(deviations)[:, None] * random.standard_normal(
        (len(deviations), repeats)
    )
    logs += SHARED_NOISE * random.standard_normal(repeats)
    return logs


def nulls(
    deviations: tuple[float, ...],
    repeats: int,
    runs: int,
    rule: Callable[[Layout], Layout],
    random: np.random.Generator,
) -> dict[str, float]:
    """Measure coverage of the ratios to the first one, of the others, and false separations."""
    first, others, alarms = [], [], []
    for _ in range(runs):
        layout = rule(fit_layout(plain_run(deviations, repeats, random)))
        first += ratios_cover(layout)
        others += ratios_cover(layout, 1)[1:]
        alarms.append(bool(find_fastest(layout).separated))
    return {
        "coverage_of_first": rounded(first),
        "coverage_of_others": rounded(others),
        "false_separations": rounded(alarms),
    }


def separations(
    deviations: tuple[float, ...],
    repeats: int,
    ahead: float,
    runs: int,
    rule: Callable[[Layout], Layout],
    random: np.random.Generator,
) -> list[int]:
    """Return how many are separated from a leader in each run."""
    found = []
    for _ in range(runs):
        logs = plain_run(deviations, repeats, random)
        logs[0] += np.log1p(ahead)
        places = find_fastest(rule(fit_layout(logs))).places
        found.append(sum(place.is_separated for place in places[1:]))
    return found


def single_trials(runs: int, seed: int) -> list[dict[str, Any]]:
    """Return the coverage of intervals from the steps of one trial."""
    rows = []
    for correlation in (0.0, 0.5, 0.8):
        for steps in (20, 30, 50, 100, 300):
            random = np.random.default_rng([seed, steps])
            noise = Noise(correlation=correlation)
            values = simulate_steps(noise, (runs, steps), random)
            found = [each for row in values if (each := single_trial_log_mean(row)) is not None]
            reliable = [each for each in found if each.is_reliable]
            rows.append(
                {
                    "correlation": correlation,
                    "steps": steps,
                    "coverage": rounded([each.contains(0.0) for each in found]),
                    "marked_unreliable": round(1 - len(reliable) / len(found), 4),
                    "coverage_unless_marked": (
                        rounded([each.contains(0.0) for each in reliable]) if reliable else None
                    ),
                }
            )
    return rows


def two_runs(runs: int, seed: int) -> list[dict[str, Any]]:
    """Return coverage and power of a difference of 5 % between two runs, noise 1.5 %."""
    rows = []
    for repeats in REPEATS:
        random = np.random.default_rng([seed, repeats])
        values = RUN_NOISE * random.standard_normal((runs, 2, repeats))
        found = [welch(*pair) for pair in values]
        moved = [welch(before, after + np.log(1.05)) for before, after in values]
        rows.append(
            {
                "repeats": repeats,
                "coverage": rounded([f is not None and f.contains(0.0) for f in found]),
                "found_5_percent": rounded([f is not None and f.low > 0 for f in moved]),
            }
        )
    return rows


def welch(before: NDArray[np.float64], after: NDArray[np.float64]) -> Estimate | None:
    """Return after - before of the repeats of two runs."""
    first, second = mean_interval(before), mean_interval(after)
    return None if first is None or second is None else welch_difference(first, second)


def automatic(runs: int, seed: int, most: int = 8) -> dict[str, dict[str, float]]:
    """Return false separations and mean repeats of `repeats = "auto"` with nine configurations."""
    random = np.random.default_rng(seed)
    cases = {
        "equal, 1.5 %": ((0.015,) * 9, 0.0),
        "equal, first 8 %, others 2 %": ((0.08, *(0.02,) * 8), 0.0),
        "leader 5 % ahead, 1.5 %": ((0.015,) * 9, 0.05),
    }
    return {
        name: automatic_runs(deviations, ahead, runs, most, random)
        for name, (deviations, ahead) in cases.items()
    }


def automatic_runs(
    deviations: tuple[float, ...], ahead: float, runs: int, most: int, random: np.random.Generator
) -> dict[str, float]:
    alarms, complete, used = [], [], []
    for _ in range(runs):
        logs = plain_run(deviations, most, random)
        logs[-1] += np.log1p(ahead)
        for repeats in range(FIRST_LOOK, most + 1):
            level = levels(most)[repeats]
            found = find_fastest(fit_layout(logs[:, :repeats]), level=level)
            if not found.undecided:
                break
        used.append(repeats)
        alarms.append(bool(found.separated))
        complete.append(len(found.separated) == len(deviations) - 1)
    return {
        "separated_any": rounded(alarms),
        "separated_all": rounded(complete),
        "mean_repeats": round(float(np.mean(used)), 2),
    }


if __name__ == "__main__":
    main()
