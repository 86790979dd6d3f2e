"""Failures that a run causes itself."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time

import pytest
from tests.support.rows import running_rank
from tests.support.running import running

from paceline.base.host.processes import is_alive, process_started_unix_s
from paceline.collectives.host import host_name
from paceline.measure.records.documents import read_statuses
from paceline.measure.records.files import read_jsonl, write_json
from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec.values import FailureSettings
from paceline.runner.launchers.descriptors import SparkOptions
from paceline.runner.trials.failure_injection import (
    Victims,
    _has_trained,
    failing,
    planned_failures,
)


def test_failures_are_drawn_from_the_seed():
    settings = FailureSettings(mean_s=10.0, count=2000)
    found = planned_failures(settings, 1, 0, 3)
    assert found == planned_failures(settings, 1, 0, 3)
    assert found != planned_failures(settings, 2, 0, 3)
    assert found != planned_failures(settings, 1, 1, 3)
    assert sum(failure.wait_s for failure in found) / 2000 == pytest.approx(10.0, rel=0.1)
    assert {failure.rank for failure in found} == {0, 1, 2}


def test_kinds_take_turns_and_change_neither_times_nor_ranks():
    settings = FailureSettings(mean_s=10.0, count=5)
    kinds = ("rank", "executor", "host")
    found = planned_failures(settings.model_copy(update={"kinds": kinds}), 1, 0, 3)
    assert [failure.kind for failure in found] == ["rank", "executor", "host", "rank", "executor"]
    assert [dataclasses.replace(f, kind="rank") for f in found] == planned_failures(
        settings, 1, 0, 3
    )


@pytest.fixture
def rank():
    with running("import time; time.sleep(60)") as process:
        yield process


def write_rank(files, pid):
    own, status = files.rank(0), status_of(0, host_name(), pid)
    write_json(own.status, status)
    own.steps.write_text(json.dumps({"step": 0}) + "\n")
    os.utime(own.steps, (status.process_started_unix_s + 100,) * 2)


def test_rank_that_trains_is_killed_and_the_moment_recorded(make_trial, rank, tmp_path):
    trial = make_trial().model_copy(update={"failures": FailureSettings(mean_s=0.01)})
    files = TrialFiles(tmp_path)
    write_rank(files, rank.pid)
    with failing(trial, files):
        assert rank.wait(20) == -9
    (row,) = read_jsonl(files.injected)
    assert row["rank"] == 0
    assert row["unix_s"] <= time.time()


def test_rank_that_has_restored_a_checkpoint_has_not_trained_yet(rank, tmp_path):
    files = TrialFiles(tmp_path)
    write_rank(files, rank.pid)
    own, (status,) = files.rank(0), read_statuses(files)
    assert _has_trained(own, status)
    own.continuations.write_text("{}\n")
    restored_unix_s = own.steps.stat().st_mtime + 1
    os.utime(own.continuations, (restored_unix_s, restored_unix_s))
    assert not _has_trained(own, status)
    os.utime(own.steps, (restored_unix_s + 1, restored_unix_s + 1))
    assert _has_trained(own, status)


def test_without_failures_nothing_is_killed(make_trial, rank, tmp_path):
    files = TrialFiles(tmp_path)
    write_rank(files, rank.pid)
    with failing(make_trial(), files):
        assert rank.poll() is None
    assert not files.injected.exists()


# Starts a rank below itself, as an executor does, and prints its process id.
EXECUTOR = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(rank.pid, flush=True)
time.sleep(60)
"""


def status_of(rank, host, pid=1):
    began_unix_s = process_started_unix_s(pid) or 0.0
    return running_rank(rank, pid, host=host, process_started_unix_s=began_unix_s)


def test_executor_above_the_rank_is_killed(make_trial):
    options = SparkOptions(master="spark://host:7077")
    trial = make_trial().model_copy(update={"launcher": "spark", "launcher_options": options})
    victims = Victims(trial, FailureSettings(mean_s=1.0), lab=None)
    backend = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
    with running(EXECUTOR, backend) as executor:
        rank = int(executor.stdout.readline())
        try:
            victims.kill("executor", status_of(0, host_name(), rank), threading.Event())
            assert executor.wait(20) == -9
            assert is_alive(rank)
        finally:
            os.kill(rank, 9)


def test_host_to_kill_is_not_the_one_of_the_launcher(make_trial):
    victims = Victims(make_trial(), FailureSettings(mean_s=1.0), lab=None)
    here, there = status_of(0, host_name()), status_of(1, "lab-1")
    assert [victims.choose("host", drawn, [here, there]).rank for drawn in (0, 1)] == [1, 1]
    assert victims.choose("rank", 0, [here, there]).rank == 0
