"""Temporary folders, and those that killed processes have left."""

from __future__ import annotations

import errno
import os
import tempfile
import warnings

import pytest

from paceline.base.errors import PacelineWarning
from paceline.base.host import locks as module
from paceline.base.host.locks import exclusive_lock, own_folder, try_lock

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


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def without_locks(request, monkeypatch):
    """Make flock(2) fail as on a file system without locks."""

    def flock(_file, _operation):
        raise OSError(request.param, os.strerror(request.param))

    module._warn_without_locks.cache_clear()
    monkeypatch.setattr(module.fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_file_system_without_locks_is_used_after_one_warning(tmp_path):
    with warnings.catch_warnings(record=True, category=PacelineWarning, action="always") as said:
        for name in ("a", "b"):
            with exclusive_lock(tmp_path / name, 0.0, "held"):
                pass
    [warning] = said
    assert "no locks (flock)" in str(warning.message)
    assert "only one at a time" in str(warning.message)


@pytest.mark.usefixtures("without_locks")
@pytest.mark.filterwarnings("ignore::paceline.base.errors.PacelineWarning")
def test_without_locks_no_folder_is_taken_for_abandoned(temporary):
    old_folder(temporary, "perhaps-used")
    with own_folder(PREFIX):
        pass
    assert [path.name for path in temporary.iterdir()] == [f"{PREFIX}perhaps-used"]


def test_other_faults_of_a_lock_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(module.fcntl, "flock", raise_io_error)
    with pytest.raises(OSError, match="I/O error"), exclusive_lock(tmp_path / "a", 0.0, "held"):
        pass


def raise_io_error(_file, _operation):
    raise OSError(errno.EIO, "I/O error")
