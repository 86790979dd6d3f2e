"""A script that continues from what an earlier trial of the run has written is refused."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from paceline.base.errors import UsageError
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import Outcome
from paceline.train.rank.script.former_files import FormerFiles

HOUR_S = 3600.0


@pytest.fixture
def run(tmp_path):
    """A run that began an hour ago, and a trial of it that has ended a minute ago."""
    files, now = RunFiles(tmp_path / "run"), time.time()
    write_json(files.manifest, {})
    os.utime(files.manifest, (now - HOUR_S, now - HOUR_S))
    outcome = Outcome(
        schema=2, trial_id="first", status="ok", exit_code=0, launcher_exit_status=0,
        failed_rank=None, message=None, launched_unix_s=now - 120.0, ended_unix_s=now - 60.0,
    )  # fmt: skip
    write_json(files.trial("first").outcome, outcome)
    return files


def written(path, age_s):
    torch.save(nn.Linear(2, 1).state_dict(), path)
    os.utime(path, (time.time() - age_s,) * 2)


def started(run, name, path, *, loads=True):
    """Return the files of a trial whose script reads a snapshot before its first step."""
    files = run.trial(name)
    files.rank(0).root.mkdir(parents=True, exist_ok=True)
    former = FormerFiles(files, files.rank(0))
    with former.noticing():
        state = torch.load(path)
        if loads:
            nn.Linear(2, 1).load_state_dict(state)
    return former


def test_a_snapshot_of_an_earlier_trial_is_named(run, tmp_path):
    snapshot = tmp_path / "snapshot.pt"
    written(snapshot, age_s=90.0)
    with pytest.raises(UsageError) as caught:
        started(run, "second", snapshot).check("train.py")
    message = str(caught.value)
    assert f"continues from {snapshot}, which trial first of this run has written" in message


@pytest.mark.parametrize(
    ("age_s", "loads"),
    [
        (2 * HOUR_S, True),  # before the run: of the user
        (600.0, True),  # before the first trial
        (10.0, True),  # by this trial itself
        (90.0, False),  # data
    ],
)
def test_other_files_may_be_read(run, tmp_path, age_s, loads):
    written(tmp_path / "snapshot.pt", age_s)
    started(run, "second", tmp_path / "snapshot.pt", loads=loads).check("train.py")


def test_a_cache_of_a_data_set_is_no_snapshot(run, tmp_path):
    cache = tmp_path / "dataset_info.json"
    written(cache, age_s=90.0)
    started(run, "second", cache).check("train.py")


def test_what_the_earlier_trial_has_read_itself_is_no_snapshot_of_its_training(run, tmp_path):
    written(tmp_path / "pretrained.pt", age_s=90.0)
    started(run, "first", tmp_path / "pretrained.pt").check("train.py")
    assert run.trial("first").rank(0).read_files.exists()
    started(run, "second", tmp_path / "pretrained.pt").check("train.py")


def test_what_is_read_after_the_first_step_does_not_count(run, tmp_path):
    written(tmp_path / "snapshot.pt", age_s=90.0)
    files = run.trial("second")
    former = FormerFiles(files, files.rank(0))
    with former.noticing():
        former.check("train.py")
        nn.Linear(2, 1).load_state_dict(torch.load(tmp_path / "snapshot.pt"))
        former.check("train.py")
    assert not files.rank(0).read_files.exists()
