"""Facts about this host, as other tools report them, and identities of processes."""

from __future__ import annotations

import os
import time

import psutil
import pytest
from tests.support.running import running

from paceline.collectives.errors import EnvironmentLacks
from paceline.collectives.host import Process, has_link, interface_address, wait_until


def test_address_is_that_of_the_interface() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        expected = [a.address for a in addresses if a.family.name == "AF_INET"]
        if expected:
            assert interface_address(name) == expected[0]


@pytest.mark.parametrize("name", ["eth77", "a-name-that-is-longer-than-any-interface's"])
def test_unknown_interface_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(EnvironmentLacks, match=r"expected one with an IPv4.*here: .*\blo\b"):
        interface_address(name)


@pytest.mark.parametrize("name", ["eth77", "a-name-that-is-longer-than-any-interface's"])
def test_only_an_interface_that_exists_has_a_link(name: str) -> None:
    assert has_link("lo")
    assert not has_link(name)


def test_identity_includes_the_start_time():
    own = Process.current()
    assert own.pid == os.getpid()
    assert own.is_alive()
    assert not Process(own.pid, own.start_ticks - 1).is_alive()
    assert not Process(own.pid, own.start_ticks, "of another boot").is_alive()


def test_step_of_the_wall_clock_does_not_change_an_identity(monkeypatch):
    own = Process.current()
    unix_s = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: unix_s)
    assert own.is_alive()
    assert Process.of(own.pid) == own


def test_identity_of_a_zombie_and_of_an_ended_process_is_not_alive():
    with running("input()") as child:
        identity = Process.of(child.pid)
        assert identity.is_alive()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not collected yet
        assert not identity.is_alive()
    assert not identity.is_alive()


def test_wait_until_gives_up():
    assert not wait_until(lambda: False, 0.05, poll_s=0.01)
