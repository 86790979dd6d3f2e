"""A rank believes in the store only what a rank of its trial has put there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from paceline.collectives.errors import EnvironmentLacks
from paceline.collectives.node.memory import gather, open_shared_file
from paceline.collectives.signatures import SECRET_VARIABLE, authentic, signed, use_secret
from paceline.collectives.store import GroupStore, connect_store, put, take
from paceline.collectives.torch_internals import TCPStore


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "of this trial")


def test_text_of_a_rank_is_read_as_it_was() -> None:
    for text in ("", "a b", "ü ☃", "1 2 3\n"):
        assert authentic("key", signed("key", text).encode()) == text
        assert signed("key", text) != text


@pytest.mark.parametrize(
    "stored", [b"", b"text", b"\xff\xfe", b"0" * 64 + b" text", signed("", "text").encode()]
)
def test_text_of_another_process_is_refused(stored: bytes) -> None:
    with pytest.raises(EnvironmentLacks, match="key 'key': expected a value that a rank of this"):
        authentic("key", stored)


def test_text_of_another_key_or_trial_is_refused() -> None:
    with pytest.raises(EnvironmentLacks):
        authentic("key", signed("another", "text").encode())
    other = signed("key", "text").encode()
    use_secret("of another trial")
    with pytest.raises(EnvironmentLacks):
        authentic("key", other)


_ATTACK = """
import os, sys
from datetime import timedelta
from torch.distributed import TCPStore
port, rank = map(int, sys.argv[1:])
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # nobody
store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
try:
    open(f"/proc/{rank}/environ").read()
    print("read the secret", flush=True)
except PermissionError:
    known = store.get("known")
    for key in ("node/memory", "world/value/1", "clock/answer/1/0"):
        store.set(key, "/etc/passwd 00")
    for key in ("world/hosts", "node/value"):
        store.set(key, known)
    print("set", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_account(store: TCPStore) -> Iterator[None]:
    """Let nobody join the store, try to read this process's environment, and set keys."""
    command = [sys.executable, "-c", _ATTACK, str(store.port), str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attacker:
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"set\n"
            yield
        finally:
            attacker.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_account_cannot_speak_for_a_rank() -> None:
    """It can set every key, and copy what ranks have signed; a rank then says so and ends."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                     timeout=timedelta(seconds=20))  # fmt: skip
    put(store, "known", "text")
    own = connect_store("127.0.0.1", store.port, 0, 2, 20)
    with another_account(store):
        with pytest.raises(EnvironmentLacks, match="key 'node/memory'"):
            open_shared_file(GroupStore(own, 1, 2), 20)
        with pytest.raises(EnvironmentLacks, match="key 'world/value/1'"):
            gather(GroupStore(own, 0, 2, "world"), "mine", 20)
        for key in ("clock/answer/1/0", "world/hosts", "node/value"):
            with pytest.raises(EnvironmentLacks, match=key):
                take(own, key)
        assert take(own, "known") == "text"
