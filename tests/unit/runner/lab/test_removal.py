"""Which labs are abandoned, and what is removed of them; the kernel's part is faked."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from paceline.collectives.host import Process
from paceline.runner.lab import LabSettings, network
from paceline.runner.lab.network import is_abandoned, remove, remove_abandoned
from paceline.runner.lab.record import Registry
from paceline.runner.lab.session import Lab


@pytest.fixture
def spaces(monkeypatch, tmp_path):
    """The names of network namespaces; those that were deleted go. No process, no shared memory."""
    names: list[str] = []
    monkeypatch.setattr(network, "namespaces", lambda: list(names))
    monkeypatch.setattr(network, "processes_in", lambda name: set())
    monkeypatch.setattr(network, "delete", names.remove)
    monkeypatch.setattr(network, "pids_with_variable", lambda name, value: set())
    monkeypatch.setattr(network, "_SHARED_MEMORY", tmp_path / "shm")
    return names


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "labs")


@pytest.fixture
def record(monkeypatch, tmp_path):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    return Lab(LabSettings(hosts=2), name="some").record


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=20)
    return process.pid


def keep(registry, record):
    with registry.locked():
        registry.save(record)


def test_lab_with_a_living_owner_is_not_abandoned_even_before_it_has_namespaces(record, spaces):
    assert record.owner == Process.current()
    assert not is_abandoned(record)


def test_lab_whose_owner_died_is_abandoned(record, spaces, dead_pid):
    spaces.append("paceline-some-hub")
    assert is_abandoned(dataclasses.replace(record, owner=Process(dead_pid, 1)))


def test_lab_whose_owners_number_now_belongs_to_another_process_is_abandoned(record, spaces):
    assert is_abandoned(dataclasses.replace(record, owner=Process(os.getpid(), 1)))


def test_lab_that_was_left_is_abandoned_only_after_a_reboot(record, spaces):
    left = dataclasses.replace(record, owner=None)
    assert is_abandoned(left)
    spaces.append("paceline-some-hub")
    assert not is_abandoned(left)


def test_removal_takes_namespaces_files_and_the_record(record, registry, spaces, tmp_path):
    keep(registry, record)
    spaces += ["paceline-some-hub", "paceline-some-0", "paceline-some-1", "paceline-other-0"]
    folder = tmp_path / "tmp" / "paceline-lab.some"
    (folder / "0").mkdir(parents=True)
    (tmp_path / "shm").mkdir()
    for host in ("some-0", "some-1", "other-0"):
        (tmp_path / "shm" / f"sm_segment.{host}.0.abc.0").touch()
    (tmp_path / "tmp" / "mine").touch()
    assert remove("some", registry) is True
    assert spaces == ["paceline-other-0"]
    assert [file.name for file in (tmp_path / "tmp").iterdir()] == ["mine"]
    assert [file.name for file in (tmp_path / "shm").iterdir()] == ["sm_segment.other-0.0.abc.0"]
    assert registry.names() == []
    assert remove("some", registry) is False


def test_removal_finds_namespaces_of_a_lab_without_a_record(registry, spaces):
    spaces += ["paceline-some-hub", "paceline-some-0"]
    assert remove("some", registry) is True
    assert spaces == []


def test_lab_that_took_the_name_meanwhile_is_not_removed(record, registry, spaces):
    keep(registry, record)
    spaces.append("paceline-some-hub")
    assert remove("some", registry, token="of another") is False
    assert spaces == ["paceline-some-hub"]
    assert registry.names() == ["some"]


def test_folder_that_is_none_of_a_labs_stays(record, registry, spaces, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    keep(registry, dataclasses.replace(record, folder=str(elsewhere)))
    assert remove("some", registry) is True
    assert elsewhere.is_dir()


def test_only_abandoned_labs_are_swept_even_where_the_record_cannot_be_read(
    record, registry, spaces, dead_pid
):
    keep(registry, record)
    keep(registry, dataclasses.replace(record, name="dead", owner=Process(dead_pid, 1)))
    registry.file("torn").write_text("{")
    spaces += ["paceline-some-0", "paceline-dead-0", "paceline-torn-hub"]
    with registry.locked():
        assert remove_abandoned(registry) == ["dead", "torn"]
    assert spaces == ["paceline-some-0"]
    assert registry.names() == ["some"]
