"""Failures that a run causes itself."""

import json
import os
import subprocess
import sys
import time

import pytest

from paceline.host.machine import host_name
from paceline.host.processes import process_started_unix_s
from paceline.records.files import read_jsonl, write_json
from paceline.records.layout import TrialFiles
from paceline.runner.failures import failing_ranks, planned_failures
from paceline.spec.failures import FailureSettings


def test_failures_are_drawn_from_the_seed():
    settings = FailureSettings(mean_s=10.0, count=2000)
    found = planned_failures(settings, 1, 0, 3)
    assert found == planned_failures(settings, 1, 0, 3)
    assert found != planned_failures(settings, 2, 0, 3)
    assert found != planned_failures(settings, 1, 1, 3)
    assert sum(wait_s for wait_s, _ in found) / 2000 == pytest.approx(10.0, rel=0.1)
    assert {rank for _, rank in found} == {0, 1, 2}


@pytest.fixture
def rank():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(10)


def write_rank(files, pid):
    own = files.rank(0)
    started = process_started_unix_s(pid)
    write_json(
        own.status,
        {
            "rank": 0,
            "host": host_name(),
            "pid": pid,
            "process_started_unix_s": started,
            "state": "running",
        },
    )
    own.steps.write_text(json.dumps({"step": 0}) + "\n")
    os.utime(own.steps, (started + 100, started + 100))


def test_rank_that_trains_is_killed_and_the_moment_recorded(make_trial, rank, tmp_path):
    trial = make_trial().model_copy(update={"failures": FailureSettings(mean_s=0.01)})
    files = TrialFiles(tmp_path)
    write_rank(files, rank.pid)
    with failing_ranks(trial, files):
        assert rank.wait(20) == -9
    (row,) = read_jsonl(files.injected)
    assert row["rank"] == 0
    assert row["unix_s"] <= time.time()


def test_without_failures_nothing_is_killed(make_trial, rank, tmp_path):
    files = TrialFiles(tmp_path)
    write_rank(files, rank.pid)
    with failing_ranks(make_trial(), files):
        assert rank.poll() is None
    assert not files.injected.exists()
