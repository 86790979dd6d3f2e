"""A user's task travels with a rendered trial."""

from __future__ import annotations

import hashlib

import pytest

from paceline.errors import UsageError
from paceline.launchers.schedulers.files import task_files


def test_users_file_is_rendered_beside_the_trial(make_trial, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("number = 1\n")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    trial = make_trial(task=f"{file}:Mine", task_sha256=sha256)
    assert task_files(trial) == {"mine.py": "number = 1\n"}
    file.unlink()
    with pytest.raises(UsageError, match=r"expected the file .*mine.py, got: No such"):
        task_files(trial)


def test_task_of_a_package_needs_no_file(make_trial):
    assert task_files(make_trial()) == {}
