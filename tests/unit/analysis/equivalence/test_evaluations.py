"""Last evaluations that differ by more than seeds of the baseline explain are named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline.analysis.equivalence.record_checks import unexplained_evaluations
from paceline.analysis.trial.evaluation import Evaluations


def ended(value: float, resolution: float = 0.01) -> Evaluations:
    """Two evaluations, the last one with this accuracy."""
    others = {
        field.name: np.zeros(2)
        for field in dataclasses.fields(Evaluations)
        if field.name not in ("metrics", "resolution")
    }
    metrics = {"accuracy": np.array([0.1, value])}
    return Evaluations(metrics=metrics, resolution={"accuracy": resolution}, **others)


def test_without_other_seeds_a_twentieth_is_named() -> None:
    found, spread = unexplained_evaluations({1: ended(0.44)}, {1: ended(0.56)})
    assert found == "accuracy ends at 0.44, the baseline's at 0.56"
    assert spread.startswith("the spread over seeds was not measured")
    assert unexplained_evaluations({1: ended(0.54)}, {1: ended(0.56)}) == []
    assert unexplained_evaluations({2: ended(0.1)}, {1: ended(0.56)}) == []


def test_one_sample_more_or_less_is_not_named() -> None:
    assert unexplained_evaluations({1: ended(0.2, 0.1)}, {1: ended(0.1, 0.1)}) == []


@pytest.mark.parametrize(("value", "named"), [(0.50, False), (0.30, True)])
def test_the_spread_of_the_baselines_seeds_decides(value: float, *, named: bool) -> None:
    seeds = {n: ended(v) for n, v in enumerate((0.54, 0.56, 0.58, 0.55, 0.57))}
    found = unexplained_evaluations({0: ended(value), 1: ended(value)}, seeds)
    assert bool(found) is named
    # the quantile of t with 4 degrees of freedom, 2.776, times 0.01581 times the root of 2
    assert not named or "two of its 5 seeds differ by at most 0.062" in found[0]
