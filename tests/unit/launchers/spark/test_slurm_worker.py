"""Folders of Spark's workers on a node of a Slurm job."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from paceline.launchers.spark import slurm_worker


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def old_folder(temporary, name):
    folder = temporary / f"{slurm_worker._PREFIX}{name}"
    folder.mkdir()
    os.utime(folder, (0, 0))
    return folder


def test_folders_of_cancelled_jobs_are_removed_and_those_in_use_stay(temporary):
    cancelled, used = old_folder(temporary, "cancelled"), old_folder(temporary, "used")
    descriptor = os.open(used, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with slurm_worker._folder() as made:
            assert Path(made).is_dir()
            assert not cancelled.exists()
            assert used.exists()
    finally:
        os.close(descriptor)
    assert not Path(made).exists()


def test_folder_that_another_job_removes_meanwhile_does_no_harm(temporary, monkeypatch):
    first, second = old_folder(temporary, "1"), old_folder(temporary, "2")
    open_folder = slurm_worker._locked

    def locked(folder):
        if folder in (first, second):
            folder.rmdir()  # the other job was faster
        return open_folder(folder)

    monkeypatch.setattr(slurm_worker, "_locked", locked)
    with slurm_worker._folder() as made:
        assert list(temporary.iterdir()) == [Path(made)]
