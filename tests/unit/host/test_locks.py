"""Temporary folders, and those that killed processes have left."""

from __future__ import annotations

import os
import tempfile

import pytest

from paceline.host import locks as module
from paceline.host.locks import own_folder, try_lock

PREFIX = "paceline-test-"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def old_folder(temporary, name):
    folder = temporary / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / "file").touch()
    os.utime(folder, (0, 0))
    return folder


def test_folder_exists_until_the_end(temporary):
    with own_folder(PREFIX) as made:
        (made / "file").touch()
        assert made.parent == temporary
    assert not made.exists()


def test_abandoned_folders_are_removed_and_those_in_use_stay(temporary):
    abandoned, used, new = (old_folder(temporary, name) for name in ("abandoned", "used", "new"))
    os.utime(new)
    descriptor = os.open(used, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert try_lock(descriptor)
        with own_folder(PREFIX):
            assert not abandoned.exists()
            assert (used / "file").exists()
            assert (new / "file").exists()
    finally:
        os.close(descriptor)


def test_own_folder_is_locked(temporary):
    with own_folder(PREFIX) as made:
        os.utime(made, (0, 0))
        with own_folder(PREFIX):
            assert made.is_dir()


def test_what_others_have_put_there_is_left_alone(temporary, tmp_path_factory):
    elsewhere = old_folder(tmp_path_factory.mktemp("elsewhere"), "target")
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{PREFIX}file").write_text("")
    os.mkfifo(temporary / f"{PREFIX}pipe")
    for name in ("file", "pipe"):
        os.utime(temporary / f"{PREFIX}{name}", (0, 0))
    with own_folder(PREFIX):
        pass
    assert sorted(path.name for path in temporary.iterdir()) == [
        f"{PREFIX}{name}" for name in ("file", "link", "pipe")
    ]
    assert (elsewhere / "file").exists()


def test_folder_of_another_user_stays(temporary, monkeypatch):
    others = old_folder(temporary, "others")
    monkeypatch.setattr(module.os, "getuid", lambda: 12345)
    with own_folder(PREFIX):
        assert (others / "file").exists()
