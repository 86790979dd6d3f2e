"""Daly's interval minimises the expected time."""

import math

import pytest

from paceline.rank.checkpoint_times import daly_interval_s


def test_daly_is_youngs_for_rare_failures():
    assert daly_interval_s(0.01, 1e6) == pytest.approx(math.sqrt(2 * 0.01 * 1e6), rel=1e-3)


def test_daly_is_the_mean_time_between_failures_where_checkpoints_cost_more():
    assert daly_interval_s(30.0, 10.0) == 10.0


@pytest.mark.parametrize("cost_s", [0.1, 5.0, 60.0])
def test_no_other_interval_is_better_than_dalys(cost_s):
    def time_s(interval_s):  # expected, with failures (Daly's equation 20)
        mtbf_s, restart_s, segments = 1000.0, 20.0, 1e5 / interval_s
        growth = math.expm1((interval_s + cost_s) / mtbf_s)
        return mtbf_s * math.exp(restart_s / mtbf_s) * growth * segments

    best = daly_interval_s(cost_s, 1000.0)
    others = [best * factor for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    assert time_s(best) < min(map(time_s, others))
