"""Resampled means of steps."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.analysis.statistics.resampling import mean_draws


def test_long_series_have_the_spread_of_short_ones() -> None:
    """Means of 1,000 steps and more are drawn from a normal distribution, others resampled."""
    random = np.random.default_rng(1)
    values = np.exp(0.3 * random.standard_normal((2, 1200)))
    values[1] = 3 * values[0]
    drawn = mean_draws(values, "long")
    resampled = mean_draws(values[:, :999], "short")
    assert drawn.mean(axis=0) == pytest.approx(values.mean(axis=1), rel=0.01)
    assert drawn.std(axis=0) == pytest.approx(resampled.std(axis=0) * np.sqrt(999 / 1200), rel=0.1)
    assert drawn[:, 1] == pytest.approx(3 * drawn[:, 0], rel=1e-6)


def test_every_block_is_drawn_equally_often() -> None:
    """8 steps have 7 blocks of 2; the last one alone has the last step, with half its weight."""
    last_step = np.array([[0.0] * 7 + [1.0]])
    assert mean_draws(last_step, "last").mean() == pytest.approx(0.5 / 7, rel=0.1)
    assert mean_draws(last_step[:, ::-1], "first").mean() == pytest.approx(0.5 / 7, rel=0.1)
