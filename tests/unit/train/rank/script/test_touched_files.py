"""Paths that a script makes are recorded; a script that continues an earlier trial is refused."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from paceline.base.errors import UsageError
from paceline.measure.records.files import document, write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import Outcome, TouchedFilesRow
from paceline.train.rank.script.touched_files import TouchedFiles

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
    touched = TouchedFiles(files, files.rank(0), path.parent)
    with touched.noticing():
        state = torch.load(path)
        if loads:
            nn.Linear(2, 1).load_state_dict(state)
    return touched


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
    assert run.trial("first").rank(0).touched_files.exists()
    started(run, "second", tmp_path / "pretrained.pt").check("train.py")


def test_what_is_read_after_the_first_step_does_not_count(run, tmp_path):
    written(tmp_path / "snapshot.pt", age_s=90.0)
    files = run.trial("second")
    touched = TouchedFiles(files, files.rank(0), tmp_path)
    with touched.noticing():
        touched.check("train.py")
        nn.Linear(2, 1).load_state_dict(torch.load(tmp_path / "snapshot.pt"))
        touched.check("train.py")
    assert not files.rank(0).touched_files.exists()


def made(run, folder, make):
    """Return the paths that a rank records while `make` works in a folder, relative to it."""
    files = run.trial("made")
    files.rank(0).root.mkdir(parents=True, exist_ok=True)
    touched = TouchedFiles(files, files.rank(0), folder)
    with touched.noticing():
        make()
    row = document(files.rank(0).touched_files, TouchedFilesRow)
    return [] if row is None else [os.path.relpath(path, folder) for path in row.made]


def replace_file(folder):
    torch.save({}, folder / "part")
    (folder / "part").rename(folder / "snapshot.pt")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: torch.save({}, folder / "snapshot.pt"), ["snapshot.pt"]),
        (lambda folder: torch.save({}, f=str(folder / "snapshot.pt")), ["snapshot.pt"]),
        (lambda folder: (folder / "log.txt").write_text("1"), ["log.txt"]),
        (lambda folder: os.makedirs(folder / "out" / "steps"), ["out"]),  # noqa: PTH103
        (lambda folder: (folder / "given" / "new").mkdir(), ["given/new"]),
        (lambda folder: (folder / "given" / "data.txt").write_text("2"), []),  # it was there
        (lambda folder: (folder / ".cache").mkdir(), []),
        (lambda folder: (folder.parent / "beside").mkdir(), []),
        (lambda folder: (folder / "given" / "data.txt").read_text(), []),
        (replace_file, ["part", "snapshot.pt"]),
    ],
)
def test_new_files_and_folders_are_recorded(run, tmp_path, make, expected):
    folder = tmp_path / "work"
    (folder / "given").mkdir(parents=True)
    (folder / "given" / "data.txt").write_text("1")
    assert made(run, folder, lambda: make(folder)) == expected


def test_files_of_the_run_itself_are_not_of_the_script(run, tmp_path):
    assert made(run, tmp_path, lambda: (run.trial("made").root / "note.txt").write_text("1")) == []


def test_a_file_that_is_made_and_then_read_before_the_first_step_is_recorded_as_read(run, tmp_path):
    made(
        run,
        tmp_path,
        lambda: ((tmp_path / "tokens").write_text("1"), (tmp_path / "tokens").read_text()),
    )
    row = document(run.trial("made").rank(0).touched_files, TouchedFilesRow)
    assert list(row.read_changed_ns) == [str(tmp_path / "tokens")]
