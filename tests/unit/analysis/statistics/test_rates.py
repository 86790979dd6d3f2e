"""Rates of a run: stalls count, columns agree, and one repeat tells nothing of others."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.analysis.statistics.rates import RepeatRate, RunRates, repeat_rate

RATES = RunRates(
    {
        "a": {0: RepeatRate(log_rate=1.0), 1: RepeatRate(log_rate=1.2)},
        "b": {0: RepeatRate(log_rate=0.5), 1: RepeatRate(log_rate=0.6)},
        "c": {0: RepeatRate(log_rate=0.1)},
    }
)


def test_stalls_count() -> None:
    seconds = np.array([0.1, 0.1, 0.1, 0.1, 0.6])
    assert repeat_rate(np.full(5, 8.0), seconds).rate == pytest.approx(40 / 1.0)
    assert repeat_rate(np.zeros(0), np.zeros(0)) is None


@pytest.mark.parametrize("names", [("a", "b"), ("b", "c"), ("c", "a")])
def test_a_ratio_is_that_of_the_rates_also_where_repeats_are_missing(
    names: tuple[str, str],
) -> None:
    first, second, ratio = RATES.rate(names[0]), RATES.rate(names[1]), RATES.ratio(*names)
    assert ratio.estimate == pytest.approx(first.estimate / second.estimate)
