"""Probes over loopback, and hosts whose remote shell does not work."""

from __future__ import annotations

import errno
import time
from contextlib import ExitStack

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.base.host import locks
from paceline.collectives.host import host_name
from paceline.runner.preflight import hosts
from paceline.runner.preflight.hosts import NoAnswer, Probes, remote_shell
from paceline.runner.preflight.probe import Facts, Probe, Seen

ASKED = {"names": ["localhost", "nosuch.invalid"], "interface": "lo"}
LIMIT_S = 60.0


@pytest.fixture
def probe():
    with ExitStack() as opened:
        yield Probe(opened)


def test_messages_and_streams(probe):
    where = probe.listen("lo", "secret")
    assert where.host == "127.0.0.1"
    link = probe.messages("127.0.0.1", where.host, where.port, "secret")
    assert 0 < link.latency_s < 1
    assert abs(link.offset_s) <= link.offset_error_s + 1e-3
    assert probe.stream("127.0.0.1", where.host, where.port, "secret").bytes_per_s > 0
    with pytest.raises(OSError, match=r"closed|reset"):
        probe.messages("127.0.0.1", where.host, where.port, "others")


def test_facts_of_this_host(probe):
    found = probe.facts(["localhost", "nosuch.invalid"], "lo")
    assert found.address == "127.0.0.1"
    assert found.host == host_name()
    assert found.resolved == {"localhost": "127.0.0.1", "nosuch.invalid": None}
    lacking = probe.facts(["localhost"], "nosuch0")
    assert lacking.address is None
    assert "'nosuch0'" in str(lacking.address_fault)


def test_shared_folder_is_used_and_removed(tmp_path):
    with ExitStack() as first, ExitStack() as second:
        one, two = Probe(first), Probe(second)
        made = one.make_folder(str(tmp_path))
        for number, each in enumerate((one, two)):
            each.use_folder(made, number)
        one.lock_folder(made)
        assert two.look_at_folder(made, 2) == Seen(appended=2, renamed=2, excluded=True)
    assert list(tmp_path.iterdir()) == []


def test_folder_without_locks_and_one_with_locks_of_one_host(tmp_path, probe, monkeypatch):
    made = probe.make_folder(str(tmp_path))
    probe.use_folder(made, 0)
    # The lock of another host is not known here.
    assert probe.look_at_folder(made, 1) == Seen(appended=1, renamed=1, excluded=False)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    assert probe.look_at_folder(made, 1).excluded is None


def script(path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_host_is_asked_through_its_remote_shell(tmp_path, monkeypatch):
    # A busy machine may need more than the usual 3 s until the probes have ended by themselves.
    monkeypatch.setattr(hosts, "_END_S", LIMIT_S)
    # A login shell may print a greeting.
    agent = script(tmp_path / "agent", 'echo Welcome; shift; exec sh -c "$*"')
    with Probes(["localhost", "nosuch.invalid"], agent) as probes:
        found = probes.ask(Facts, "facts", {0: ASKED, 1: ASKED}, LIMIT_S)
        assert [found[n].host for n in (0, 1)] == [host_name()] * 2
        refused = probes.ask(str, "make_folder", {1: {"folder": f"{tmp_path}/nosuch"}}, LIMIT_S)[1]
        assert isinstance(refused, NoAnswer)
        assert "No such file" in refused.why
        # A request that fails does not end the probe.
        assert probes.ask(str, "interface_to", {1: {"name": "localhost"}}, LIMIT_S) == {1: "lo"}
        processes = [probe.process for probe in probes._probes]
    assert [process.returncode for process in processes] == [0, 0]


def test_host_that_cannot_be_reached_says_why(tmp_path):
    agent = script(tmp_path / "agent", "echo no route to host >&2; exit 255")
    with Probes(["localhost", "far.invalid"], agent) as probes:
        found = probes.ask(Facts, "facts", {1: ASKED}, LIMIT_S)
    assert found == {1: NoAnswer("its probe has ended: no route to host")}


def test_host_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "_END_S", 0.2)
    agent = script(tmp_path / "agent", "exec sleep 600")
    began_s = time.monotonic()
    with Probes(["localhost", "far.invalid"], agent) as probes:
        assert probes.ask(Facts, "facts", {1: ASKED}, 0.1) == {1: NoAnswer("no answer in time")}
        # Its late answer would be taken for that of another request.
        assert probes.ask(Facts, "facts", {1: ASKED}, 600) == {1: NoAnswer("no answer in time")}
        [_, process] = [probe.process for probe in probes._probes]
    assert process.poll() is not None
    assert time.monotonic() - began_s < LIMIT_S


def test_remote_shell_is_that_of_mpirun():
    assert remote_shell({}).startswith("ssh -o BatchMode=yes")
    assert remote_shell({"PRTE_MCA_plm_ssh_agent": "/lab/agent"}) == "/lab/agent"
    assert remote_shell({"HYDRA_LAUNCHER_EXEC": "rsh"}) == "rsh"


def test_missing_remote_shell_is_reported():
    with pytest.raises(EnvironmentLacks, match=r"program nosuch-ssh .*--agent"):
        Probes(["far.invalid"], "nosuch-ssh -x")
