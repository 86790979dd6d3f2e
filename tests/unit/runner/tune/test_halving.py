import math
import random
from types import SimpleNamespace

import pytest

from paceline.analysis.statistics.rates import RepeatRate
from paceline.plan.spec.models import TuneSettings
from paceline.runner.tune.search import Bracket, Measurements
from paceline.runner.tune.spaces import SearchTarget


@pytest.fixture(autouse=True)
def _repeats_are_named(monkeypatch):
    def repeated(trial, repeat):
        return SimpleNamespace(configuration=trial.configuration, repeat=repeat)

    monkeypatch.setattr("paceline.runner.tune.search.repeated", repeated)


def run(speeds, *, repeats=4, names=None):
    """The rungs: what was alive at each, by the measurements wanted."""
    trials = [SimpleNamespace(configuration=name) for name in names or speeds]
    settings = TuneSettings(repeats=repeats)
    bracket = Bracket(SearchTarget(workload="tiny", name="x"), trials, settings)
    measured, rungs = Measurements(), {}
    while not bracket.finished:
        due = bracket.due(measured)
        rungs[due[-1].repeat + 1] = list(dict.fromkeys(trial.configuration for trial in due))
        for trial in due:
            name, speed = trial.configuration, speeds[trial.configuration]
            if math.isnan(speed):
                measured.failures[name] = "it failed"
            else:
                rates = measured.rates.setdefault(name, {})
                rates[trial.repeat] = RepeatRate(log_rate=math.log(speed))
        bracket.judge(measured)
    return None if bracket.best is None else bracket.best.configuration, rungs


@pytest.mark.parametrize(("repeats", "rungs"), [(4, [1, 2, 4]), (9, [1, 2, 4, 8]), (1, [1])])
def test_measurements_grow_until_the_most_that_is_wanted(repeats, rungs):
    assert list(run({"default": 1.0, "a": 2.0}, repeats=repeats)[1]) == rungs


@pytest.mark.parametrize("seed", range(10))
def test_fastest_wins_whatever_the_order_and_the_first_stays(seed):
    names = [f"c{i}" for i in range(16)]
    draw = random.Random(seed)
    speeds = {name: draw.uniform(1, 2) for name in names}
    fastest = max(speeds, key=speeds.__getitem__)
    draw.shuffle(names)
    best, rungs = run(speeds, names=names)
    assert best == fastest
    assert len(rungs[1]) == 16
    # the fastest half, and the default if it is not among them
    assert len(rungs[2]) in (8, 9)
    assert len(rungs[4]) in (math.ceil(len(rungs[2]) / 2), math.ceil(len(rungs[2]) / 2) + 1)
    assert all(rung[0] == names[0] for rung in rungs.values())


def test_slow_candidates_after_a_fast_one_are_dropped():
    best, rungs = run({"default": 9.0, "a": 1.0, "b": 1.1, "c": 0.9})
    assert rungs == {1: ["default", "a", "b", "c"], 2: ["default", "b"], 4: ["default"]}
    assert best == "default"


def test_a_candidate_that_fails_is_dropped_and_cannot_win():
    best, rungs = run({"default": math.nan, "a": 1.0, "b": math.nan})
    assert rungs[2] == ["a"]
    assert best == "a"


def test_nothing_wins_where_all_fail():
    best, rungs = run({"default": math.nan, "a": math.nan})
    assert best is None
    assert list(rungs) == [1]


def test_one_candidate_is_measured_once():
    assert run({"default": 3.0}) == ("default", {1: ["default"]})
