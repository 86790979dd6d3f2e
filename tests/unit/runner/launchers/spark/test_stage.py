"""The driver checks its slots before a barrier stage, which Spark would start after ten minutes."""

from __future__ import annotations

import time
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from paceline.base.errors import EnvironmentLacks
from paceline.runner.launchers.spark import stage
from paceline.runner.launchers.spark.session import Session


def session_with(*slots: int, master: str = "spark://head:7077") -> Session:
    """Return the session of a context that reports these numbers of slots, one after the other."""
    answers = chain(slots, repeat(slots[-1]))
    spark = SimpleNamespace(
        resourceProfileManager=lambda: SimpleNamespace(defaultResourceProfile=lambda: None),
        maxNumConcurrentTasks=lambda _profile: next(answers),
    )
    context: Any = SimpleNamespace(
        _jsc=SimpleNamespace(sc=lambda: spark),
        master=master,
        getConf=lambda: {"spark.task.cpus": "3"},
    )
    return Session(context, pytest.fail, time.monotonic())


def test_executors_that_register_one_after_the_other_are_waited_for(make_job, monkeypatch):
    monkeypatch.setattr(stage, "_POLL_S", 0.001)
    stage._check_slots(session_with(0, 0, 1, 1, 2), make_job(launcher="spark"), time.monotonic())


@pytest.mark.parametrize("master", ["spark://head:7077", "local[1]"])
def test_too_few_slots_are_refused_with_both_numbers(make_job, monkeypatch, master):
    monkeypatch.setattr(stage, "_POLL_S", 0.001)
    job = make_job(launcher="spark", slots_s=0.01)
    expected = (
        r"has 1 slot\(s\) of 3 cpu.* needs 2 at once.*longer than 0\.01 s \(limits\.slots_s\)"
    )
    with pytest.raises(EnvironmentLacks, match=expected):
        stage._check_slots(session_with(1, master=master), job, time.monotonic())


def test_limit_of_slots_counts_from_the_submit(make_job, monkeypatch):
    monkeypatch.setattr(stage, "_POLL_S", 0.001)
    job = make_job(launcher="spark", slots_s=600)
    with pytest.raises(EnvironmentLacks, match="has 1 slot"):
        stage._check_slots(session_with(1), job, time.monotonic() - 601)
    stage._check_slots(session_with(2), job, time.monotonic() - 601)  # they came in the meantime


def test_spark_that_tells_no_slots_checks_them_itself(make_job, monkeypatch, capsys):
    monkeypatch.setattr(stage, "count_slots", lambda _context: None)
    stage._check_slots(session_with(0), make_job(launcher="spark"), time.monotonic())
    assert "it checks them itself" in capsys.readouterr().err


def test_too_few_slots_in_sparks_own_check_are_a_lack_of_the_environment(make_job, monkeypatch):
    def collect() -> None:
        raise Py4JError("[SPARK-24819]: Barrier execution mode does not allow run a barrier stage")

    stages = SimpleNamespace(mapPartitions=lambda _task: SimpleNamespace(collect=collect))
    tasks = SimpleNamespace(barrier=lambda: stages)
    context: Any = SimpleNamespace(parallelize=lambda _range, _ranks: tasks)
    end = stage._train_once(context, make_job(launcher="spark"))
    assert (end.exit_code, "expected 2 slots at once" in str(end.error)) == (3, True)
