"""Simulate runs whose truth is known: how often are intervals and verdicts wrong, and their power?

    python statistics_study.py --out statistics.json [--runs 1000]

Everything is seeded. Every repeat of a configuration has a noise of 1.5 %, and 2 % that all share
in a repeat, unless the situation says otherwise. A disturbed repeat takes 1.2 to 6 times as long.
Intervals are those of the ratios to the first configuration, of which some situations are about.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import write_results
from paceline.analysis.statistics.fastest import find_fastest
from paceline.analysis.statistics.intervals import FIRST_LOOK, levels
from paceline.analysis.statistics.model import fit

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from paceline.analysis.statistics.fastest import Fastest
    from paceline.analysis.statistics.model import Fit

    Values = NDArray[np.float64]

SIZES, REPEATS = (2, 9, 20), (3, 5, 8)
NOISE, SHARED_NOISE = 0.015, 0.02
FACTORS = (1.2, 6.0)  # of the time of a disturbed repeat
TWO_SPEEDS = 1.9  # ratio of the speeds of a configuration that is slow in one of four repeats
LEADS = {"found_5_percent": 1.05, "found_1.8": 1.8}  # of the last configuration over the others
POWER_AT = (9, 5)  # configurations and repeats


@dataclass
class Run:
    """The repeats of a simulated run, shape (configurations, repeats).

    loaded: repeats beside which load of other processes was measured. speeds: those of the first
    configuration that were seen, which its intervals have to contain.
    """

    logs: Values
    random: np.random.Generator
    loaded: NDArray[np.bool_] = field(init=False)
    speeds: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        self.loaded = np.zeros(self.logs.shape, dtype=bool)

    def slow(self, hit: NDArray[np.bool_], factors: tuple[float, float] = FACTORS) -> None:
        self.logs = self.logs - hit * np.log(self.random.uniform(*factors, self.logs.shape))

    def drawn(self, share: float | Values) -> NDArray[np.bool_]:
        return self.random.random(self.logs.shape) < share


def _disturbed(share: float) -> Callable[[Run], None]:
    return lambda run: run.slow(run.drawn(share))


def _measured(run: Run) -> None:
    hit = run.drawn(0.2)
    run.slow(hit)
    run.loaded = hit & run.drawn(2 / 3)


def _windows(run: Run) -> None:
    """Disturb about a fifth of the repeats, two to four that follow one another in time."""
    size = run.logs.size
    hit = np.zeros(size, dtype=bool)
    for _ in range(max(round(0.2 * size / 3), 1)):
        begin = run.random.integers(size)
        hit[begin : begin + run.random.integers(2, 5)] = True
    run.slow(hit[_places(run)])


def _places(run: Run) -> NDArray[np.int64]:
    """Return when each repeat ran: repeat by repeat, the configurations in random order."""
    configurations, repeats = run.logs.shape
    order = np.argsort(run.random.random((repeats, configurations)), axis=1).T
    places: NDArray[np.int64] = np.arange(repeats) * configurations + order
    return places


def _unequal(run: Run) -> None:
    deviations = NOISE * np.exp(0.7 * run.random.standard_normal((len(run.logs), 1)))
    run.logs = run.logs + np.sqrt(deviations**2) * run.random.standard_normal(run.logs.shape)


def _drift(run: Run) -> None:
    run.logs = run.logs - 0.2 * _places(run) / run.logs.size


def _two_speeds(run: Run) -> None:
    slow = run.random.random(run.logs.shape[1]) < 0.25
    run.logs[0] -= slow * np.log(TWO_SPEEDS)
    run.speeds = tuple({-float(is_slow) * float(np.log(TWO_SPEEDS)) for is_slow in slow})


def _noisy(run: Run) -> None:
    rest = np.sqrt(4**2 - 1) * NOISE
    run.logs[0] += rest * run.random.standard_normal(run.logs.shape[1])


def _three_of_five(run: Run) -> None:
    repeats = run.logs.shape[1]
    hit = np.zeros(run.logs.shape, dtype=bool)
    hit[0, run.random.permutation(repeats)[: round(0.6 * repeats)]] = True
    run.slow(hit)


def _by_length(run: Run) -> None:
    """Disturb slow configurations, whose trials are longer, up to seven times as often."""
    run.slow(run.drawn(np.linspace(0.05, 0.35, len(run.logs))[:, None]))


def _cold(run: Run) -> None:
    run.logs[:, 0] -= np.log(run.random.uniform(1.05, 1.5, len(run.logs)))


def _fast(run: Run) -> None:
    run.slow(run.drawn(0.05), (1 / 1.5, 1 / 1.05))


SITUATIONS: dict[str, Callable[[Run], None]] = {
    "idle": _disturbed(0.0),
    "5 % disturbed": _disturbed(0.05),
    "10 % disturbed": _disturbed(0.1),
    "20 % disturbed": _disturbed(0.2),
    "20 %, two thirds of them measured as load": _measured,
    "20 % in windows over several trials": _windows,
    "30 % disturbed": _disturbed(0.3),
    "20 %, mild (1.03 to 1.2)": lambda run: run.slow(run.drawn(0.2), (1.03, 1.2)),
    "noise differs between configurations": _unequal,
    "drift of 20 % over the run": _drift,
    "one configuration is slow in one of four": _two_speeds,
    "one configuration four times as noisy": _noisy,
}
BROKEN_ASSUMPTIONS: dict[str, Callable[[Run], None]] = {
    "three of five repeats of one disturbed": _three_of_five,
    "longer trials disturbed more often": _by_length,
    "first repeat cold": _cold,
    "5 % faster by 1.05 to 1.5": _fast,
}
ALL = SITUATIONS | BROKEN_ASSUMPTIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.monotonic()
    cells = [
        (name, configurations, repeats, options.runs, options.seed)
        for name in ALL
        for configurations in SIZES
        for repeats in REPEATS
    ]
    with ProcessPoolExecutor(2) as pool:
        rows = []
        for row in pool.map(measured, *zip(*cells, strict=True)):
            rows.append(row)
            print(row, flush=True)
    results = {
        "situations": summary(rows),
        "cells": rows,
        "automatic_repeats": automatic(options.runs // 5, options.seed),
        "seconds": round(time.monotonic() - begin, 1),
    }
    write_results(
        options.out,
        "statistics_study",
        {"runs": options.runs, "seed": options.seed, "results": results},
    )


def simulated(name: str, configurations: int, repeats: int, random: np.random.Generator) -> Run:
    """Return a run of equal configurations in a situation."""
    noise = NOISE * random.standard_normal((configurations, repeats))
    run = Run(noise + SHARED_NOISE * random.standard_normal(repeats), random)
    ALL[name](run)
    return run


def measured(name: str, configurations: int, repeats: int, runs: int, seed: int) -> dict[str, Any]:
    """Measure one cell: errors and coverage of ratios, false separations and, in one, power."""
    random = np.random.default_rng([seed, list(ALL).index(name), configurations, repeats])
    errors, covered, widths, alarms = [], [], [], []
    found: dict[str, list[float]] = {lead: [] for lead in LEADS}
    for _ in range(runs):
        run = simulated(name, configurations, repeats, random)
        fitted = fit(run.logs, run.loaded)
        for ratio in ratios(fitted):
            errors.append(min(abs(ratio.value + speed) for speed in run.speeds))
            covered.append(all(ratio.low <= -speed <= ratio.high for speed in run.speeds))
            widths.append((ratio.high - ratio.low) / 2)
        alarms.append(bool(fastest(fitted).separated))
        for lead, factor in LEADS.items() if (configurations, repeats) == POWER_AT else ():
            run.logs[-1] += np.log(factor)
            places = fastest(fit(run.logs, run.loaded))
            run.logs[-1] -= np.log(factor)
            is_leader = places.leader == str(configurations - 1)
            found[lead].append(is_leader * len(places.separated) / (configurations - 1))
    return {
        "situation": name,
        "configurations": configurations,
        "repeats": repeats,
        "error_median": share(np.median(errors)),
        "error_95": share(np.quantile(errors, 0.95)),
        "covered": share(np.mean(covered)),
        "half_width": share(np.median(widths)),
        "false_separations": share(np.mean(alarms)),
        **{lead: share(np.mean(shares)) for lead, shares in found.items() if shares},
    }


def ratios(fitted: Fit | None) -> list[Any]:
    """Return log(each / the first)."""
    if fitted is None:
        return []
    first, *others = (speed for speed in fitted.speeds if speed is not None)
    return [(other - first).estimate() for other in others]


def fastest(fitted: Fit | None, level: float = 0.05) -> Fastest:
    speeds = () if fitted is None else fitted.speeds
    named = {str(number): speed for number, speed in enumerate(speeds) if speed is not None}
    return find_fastest(named, 5, level=level)


def share(value: Any) -> float:
    return round(float(value), 4)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each situation: the cell of POWER_AT, and the least coverage of all."""
    found = []
    for name in ALL:
        own = [row for row in rows if row["situation"] == name]
        main_cell = next(r for r in own if (r["configurations"], r["repeats"]) == POWER_AT)
        extremes = {
            "least_covered": min(row["covered"] for row in own),
            "mean_covered": share(np.mean([row["covered"] for row in own])),
            "most_false": max(row["false_separations"] for row in own),
        }
        found.append(main_cell | extremes)
    return found


def automatic(runs: int, seed: int, most: int = 8) -> list[dict[str, Any]]:
    """Return separations and mean repeats of `repeats = "auto"` with nine configurations."""
    rows = []
    for name, lead in (
        ("idle", 0.0),
        ("20 % disturbed", 0.0),
        ("idle", 0.05),
        ("20 % disturbed", 0.05),
    ):
        random = np.random.default_rng([seed, most])
        separated, used = [], []
        for _ in range(runs):
            run = simulated(name, 9, most, random)
            run.logs[-1] += np.log1p(lead)
            for repeats in range(FIRST_LOOK, most + 1):
                places = fastest(fit(run.logs[:, :repeats]), levels(most)[repeats])
                if not places.undecided:
                    break
            used.append(repeats)
            separated.append(len(places.separated))
        rows.append(
            {
                "situation": name,
                "lead": lead,
                "separated_any": share(np.mean(np.array(separated) > 0)),
                "separated_all": share(np.mean(np.array(separated) == 8)),
                "mean_repeats": round(float(np.mean(used)), 2),
            }
        )
    return rows


if __name__ == "__main__":
    main()
