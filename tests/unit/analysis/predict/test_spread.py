"""The interval of a node's step contains a new run as often as it says, whatever the noise is."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.analysis.predict.node import Spread

RUNS = 300
CONFIGURATIONS = 4


def measured(logs: np.ndarray) -> list[Any]:
    """Steps of one run; logarithms of seconds by configuration and repeat."""
    return [
        SimpleNamespace(
            source=(Path("run"), f"c{number}"),
            samples=8.0,
            mean_s=math.exp(value),
            whole_s=math.exp(value),
            record=SimpleNamespace(trial=SimpleNamespace(repeat=repeat)),
        )
        for number, values in enumerate(logs)
        for repeat, value in enumerate(values)
    ]


@pytest.mark.parametrize("repeats", [2, 3, 5])
@pytest.mark.parametrize(("drift", "noise"), [(0.0, 0.05), (0.1, 0.03)])
def test_nine_of_ten_new_runs_are_within_the_interval(repeats, drift, noise) -> None:
    generator = np.random.default_rng(7)

    def run() -> np.ndarray:
        shared = drift * generator.standard_normal(repeats)
        return shared + noise * generator.standard_normal((CONFIGURATIONS, repeats))

    covered = 0
    for _ in range(RUNS):
        steps = measured(run())
        (point,) = Spread(steps).own_points(steps[:repeats])
        draws = np.log(point.draws(generator)) + point.noise(generator)
        low, high = np.quantile(draws, [0.05, 0.95])
        covered += low <= run()[0].mean() <= high
    # two repeats do not show whether they share something, so their intervals are wider
    assert 0.86 <= covered / RUNS <= (1 if repeats == 2 else 0.97)
