"""The driver checks its slots before a barrier stage, which Spark would start after ten minutes."""

from __future__ import annotations

from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from paceline.errors import EnvironmentLacks
from paceline.launchers.spark import stage


def context_with(*slots: int, master: str = "spark://head:7077") -> SimpleNamespace:
    """Return a context that reports these numbers of slots, one after the other."""
    answers = chain(slots, repeat(slots[-1]))
    spark = SimpleNamespace(
        resourceProfileManager=lambda: SimpleNamespace(defaultResourceProfile=lambda: None),
        maxNumConcurrentTasks=lambda _profile: next(answers),
    )
    return SimpleNamespace(
        _jsc=SimpleNamespace(sc=lambda: spark),
        master=master,
        getConf=lambda: {"spark.task.cpus": "3"},
    )


def test_executors_that_register_one_after_the_other_are_waited_for(make_job, monkeypatch):
    monkeypatch.setattr(stage, "_POLL_S", 0.001)
    stage._check_slots(context_with(0, 0, 1, 1, 2), make_job(launcher="spark"))


@pytest.mark.parametrize("master", ["spark://head:7077", "local[1]"])
def test_too_few_slots_are_refused_with_both_numbers(make_job, monkeypatch, master):
    monkeypatch.setattr(stage, "_POLL_S", 0.001)
    job = make_job(launcher="spark", slots_s=0.01)
    expected = (
        r"has 1 slot\(s\) of 3 cpu.* needs 2 at once.*longer than 0\.01 s \(limits\.slots_s\)"
    )
    with pytest.raises(EnvironmentLacks, match=expected):
        stage._check_slots(context_with(1, master=master), job)
