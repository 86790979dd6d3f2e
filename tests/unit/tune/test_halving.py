import math
import random

import pytest

from paceline.tune.halving import SuccessiveHalving


def run(speeds, *, keep=2, repeats=4, names=None):
    """The rungs: what was alive at each, by the measurements wanted."""
    halving = SuccessiveHalving(names or list(speeds), keep=keep, repeats=repeats)
    rungs = {}
    while not halving.finished:
        rungs[halving.wanted] = halving.alive
        halving.report({name: speeds[name] for name in halving.alive})
    return halving, rungs


def test_measurements_double_until_the_most_that_is_wanted():
    _, rungs = run({"default": 1.0, "a": 2.0}, repeats=4)
    assert list(rungs) == [1, 2, 4]
    _, rungs = run({"default": 1.0, "a": 2.0}, repeats=9, keep=3)
    assert list(rungs) == [1, 3, 9]
    _, rungs = run({"default": 1.0, "a": 2.0}, repeats=1)
    assert list(rungs) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_fastest_wins_whatever_the_order(seed):
    names = [f"c{i}" for i in range(12)]
    speeds = {name: 10.0 + i for i, name in enumerate(names)}
    random.Random(seed).shuffle(names)
    halving, rungs = run(speeds, names=names)
    assert halving.best == "c11"
    assert "c11" in rungs[4]


@pytest.mark.parametrize("seed", range(20))
def test_rungs_get_smaller_and_the_first_stays(seed):
    names = [f"c{i}" for i in range(16)]
    draw = random.Random(seed)
    speeds = {name: draw.uniform(1, 2) for name in names}
    _, rungs = run(speeds, names=names)
    assert len(rungs[1]) == 16
    # the fastest half, and the default if it is not among them
    assert len(rungs[2]) in (8, 9)
    assert len(rungs[4]) in (math.ceil(len(rungs[2]) / 2), math.ceil(len(rungs[2]) / 2) + 1)
    assert all(rung[0] == "c0" for rung in rungs.values())


def test_slow_candidates_after_a_fast_one_are_dropped():
    _, rungs = run({"default": 9.0, "a": 1.0, "b": 1.1, "c": 0.9})
    assert rungs == {1: ["default", "a", "b", "c"], 2: ["default", "b"], 4: ["default"]}


def test_a_candidate_that_fails_is_dropped_and_cannot_win():
    halving, rungs = run({"default": math.nan, "a": 1.0, "b": math.nan})
    assert rungs[2] == ["a"]
    assert halving.best == "a"


def test_nothing_wins_where_all_fail():
    halving, rungs = run({"default": math.nan, "a": math.nan})
    assert halving.best is None
    assert list(rungs) == [1]


def test_one_candidate_is_measured_as_often_as_any():
    halving, rungs = run({"default": 3.0})
    assert list(rungs) == [1, 2, 4]
    assert halving.best == "default"
