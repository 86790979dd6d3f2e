"""A rank maps no memory but that of its own user, whatever the trial's store says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from paceline.collectives.node import memory
from paceline.collectives.node.memory import open_shared_file
from paceline.collectives.store import GroupStore, connect_store
from paceline.collectives.torch_internals import TCPStore

_HEADER = b"SQLite format 3\0"  # everybody knows how such a file begins


def opened(published: str) -> bool:
    descriptor = memory._attach(published)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


@pytest.fixture
def anonymous() -> Iterator[int]:
    """A memory file as `_create` makes it, but with a nonce that others know."""
    descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 1 << 44)
    os.pwrite(descriptor, _HEADER, 0)
    yield descriptor
    os.close(descriptor)


def test_own_memory_is_opened(anonymous: int) -> None:
    assert opened(f"/proc/{os.getpid()}/fd/{anonymous} {_HEADER.hex()}")


def test_a_file_of_the_user_is_refused_under_every_path(tmp_path: Path) -> None:
    private = tmp_path / "private.db"
    private.write_bytes(_HEADER + bytes(100))
    private.chmod(0o600)
    with private.open("rb") as file:
        for path in (
            str(private),
            f"/proc/{os.getpid()}/fd/{file.fileno()}",
            f"/proc/{os.getpid()}/root{private}",
            f"/proc/self/fd/{file.fileno()}",
        ):
            assert not opened(f"{path} {_HEADER.hex()}")
        private.unlink()  # open and without a name, but of a file system
        assert not opened(f"/proc/{os.getpid()}/fd/{file.fileno()} {_HEADER.hex()}")


def test_a_file_with_the_name_of_memory_is_refused(tmp_path: Path) -> None:
    """A link text alone says nothing: a folder may have such a name."""
    folder = tmp_path / "memfd:paceline"
    folder.write_bytes(_HEADER)
    with folder.open("rb") as file:
        assert not opened(f"/proc/{os.getpid()}/fd/{file.fileno()} {_HEADER.hex()}")


@pytest.mark.parametrize(("name", "size"), [("other", 1 << 44), ("paceline", 4096)])
def test_other_memory_of_the_user_is_refused(name: str, size: int) -> None:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, _HEADER, 0)
        assert not opened(f"/proc/{os.getpid()}/fd/{descriptor} {_HEADER.hex()}")
    finally:
        os.close(descriptor)


_ATTACK = """
import os, sys
port, victim, header = sys.argv[1:]
from datetime import timedelta
from torch.distributed import TCPStore
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # nobody
store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=20))
if victim == "memory":
    descriptor = os.memfd_create("paceline")
    os.ftruncate(descriptor, 1 << 44)
    os.pwrite(descriptor, bytes.fromhex(header), 0)
    victim = f"/proc/{os.getpid()}/fd/{descriptor}"
store.set("node/memory", f"{victim} {header}")
print("set", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("victim", ["file", "memory"])
def test_another_account_cannot_choose_the_memory_of_a_rank(tmp_path: Path, victim: str) -> None:
    """nobody joins root's store and names a private file of root's, or memory of its own."""
    private = tmp_path / "private.db"
    private.write_bytes(_HEADER + bytes(100))
    private.chmod(0o600)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                     timeout=timedelta(seconds=20))  # fmt: skip
    target = str(private) if victim == "file" else "memory"
    command = [sys.executable, "-c", _ATTACK, str(store.port), target, _HEADER.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attacker:
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"set\n"
            own = connect_store("127.0.0.1", store.port, 1, 2, 20)
            own.set("node/attached/all", '["yes", "yes"]')  # of rank 0
            assert open_shared_file(GroupStore(own, 1, 2), 20) is None
        finally:
            attacker.kill()
    assert private.read_bytes() == _HEADER + bytes(100)
