"""`paceline doctor --hosts` names each fault that was planted between the hosts of a lab."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.cluster.lab.labs import checked_lab
from tests.support.commands import run_command
from tests.support.documentation import ROOT
from tests.support.environment import kept_environment
from tests.support.outputs import compare_outputs, without_places

from paceline.runner.lab import INTERFACE, Lab, LabSettings, network
from paceline.runner.lab.record import Host

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab"), pytest.mark.timeout(300)]

PAGE = ROOT / "docs/how-to/clusters.md"
LIMIT_S = 120.0
# With it the speed of the links does not depend on the load of this machine.
RATE, SLOW_RATE = "200mbit", "10mbit"
# Python imports it at its start: another clock, another torch, and a file system without locks.
FAKES = """
import errno, fcntl, time
from importlib import metadata

real_time, real_version = time.time, metadata.version


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


time.time = lambda: real_time() + 30
metadata.version = lambda name: "2.9.0" if name == "torch" else real_version(name)
fcntl.flock = no_locks
"""
# The routing rules of a host drop all TCP that arrives, as a firewall would. Their place is before
# the table of local addresses, whose rule has preference 0.
BLOCK_TCP = (
    ("ip", "rule", "add", "pref", "5", "iif", INTERFACE, "ipproto", "tcp", "blackhole"),
    ("ip", "rule", "add", "pref", "10", "lookup", "local"),
    ("ip", "rule", "delete", "pref", "0"),
)
ALLOW_TCP = (
    ("ip", "rule", "add", "pref", "0", "lookup", "local"),
    ("ip", "rule", "delete", "pref", "5"),
    ("ip", "rule", "delete", "pref", "10"),
)


@pytest.fixture(scope="module")
def three() -> Iterator[Lab]:
    with checked_lab(LabSettings(hosts=3, slots=2, bandwidth=RATE)) as made:
        yield made


def on(host: Host, *words: str) -> None:
    subprocess.run(host.command(*words), check=True, capture_output=True, timeout=LIMIT_S)


def examined(lab: Lab, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command on the first host."""
    command = [sys.executable, "-m", "paceline.cli", "doctor", *words]
    environment = kept_environment(PACELINE_CACHE=str(folder / "cache"), COLUMNS="80")
    return run_command(lab.hosts[0].command(*command), LIMIT_S, env=environment, cwd=folder)


def doctor(lab: Lab, folder: Path, *words: str) -> dict[str, dict[str, str]]:
    """Return the faults by what is wrong."""
    done = examined(lab, folder, *words, "--json")
    findings = json.loads(done.stdout)["findings"]
    faults = {each["what"]: each for each in findings if not each["ok"]}
    assert done.returncode == (3 if faults else 0), done.stderr
    assert list(folder.glob(".paceline-doctor-*")) == []
    return faults


@contextmanager
def slow_link(lab: Lab, host: Host) -> Iterator[None]:
    """Limit the link of one host more than those of the others."""
    alone = dataclasses.replace(lab.record, hosts=[host])
    network.shape(alone, SLOW_RATE)
    try:
        yield
    finally:
        network.shape(alone, RATE)


def names(lab: Lab) -> list[str]:
    return [host.address for host in lab.hosts]


def test_hosts_without_a_fault(three: Lab, tmp_path: Path) -> None:
    slots = [f"{name}:1" for name in names(three)]
    assert doctor(three, tmp_path, "--hosts", ",".join(slots), "--link", RATE) == {}


def test_the_page_shows_a_slow_link(three: Lab, tmp_path: Path) -> None:
    hosts = ",".join(f"{name}:2" for name in names(three))
    with (
        slow_link(three, three.hosts[2]),
        TemporaryDirectory(dir="/tmp") as folder,  # a short name, which is not broken into lines
    ):
        done = examined(three, tmp_path, "--hosts", hosts, "--folder", folder)
    shown = done.stdout.replace(folder, "/shared/runs")
    for number, host in enumerate(three.hosts, start=1):
        shown = shown.replace(host.name, f"node{number}").replace(host.address, f"node{number}")
    command = "paceline doctor --hosts node1:2,node2:2,node3:2 --folder /shared/runs"
    compare_outputs(PAGE, {command: without_places(shown, tmp_path)})


def test_faults_of_one_host(three: Lab, tmp_path: Path) -> None:
    """Its clock, its torch, its file system and its link are wrong at the same time."""
    last = three.hosts[2]
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes/sitecustomize.py").write_text(FAKES)
    agent = tmp_path / "agent"
    agent.write_text(
        f'#!/bin/sh\n[ "$1" = {last.address} ] && export PYTHONPATH={tmp_path}/fakes\n'
        f'exec {three.agent} "$@"\n'
    )
    agent.chmod(0o755)
    with slow_link(three, last):
        hosts = ",".join(names(three))
        faults = doctor(three, tmp_path, "--hosts", hosts, "--agent", str(agent))
    assert set(faults) == {"bandwidth", "clocks", "versions", "run folder"}
    assert f"every link of {last.address}: less" in faults["bandwidth"]["why"]
    assert f"{last.address} is +30.0" in faults["clocks"]["why"]
    assert f"2.9.0 on {last.address};" in faults["versions"]["why"]
    assert faults["versions"]["found"] == "torch differ"
    assert f"no locks (flock) on {last.address};" in faults["run folder"]["why"]


def test_blocked_port_and_too_few_slots(three: Lab, tmp_path: Path) -> None:
    first, second, last = names(three)
    for words in BLOCK_TCP:
        on(three.hosts[2], *words)
    try:
        faults = doctor(three, tmp_path, "--hosts", f"{first}:1,{second}:500,{last}:1")
    finally:
        for words in ALLOW_TCP:
            on(three.hosts[2], *words)
    assert set(faults) == {"ports", "slots"}
    assert faults["ports"]["found"] == "2 of 6 ways"
    for host in (first, second):
        assert f"{host} -> {last}" in faults["ports"]["why"]
        assert f"{last} -> {host}" in faults["ports"]["why"]
    assert f"{first} -> {second}" not in faults["ports"]["why"]
    assert f"{second} has {len(os.sched_getaffinity(0))} cores for 500" in faults["slots"]["why"]


def test_wrong_interface(three: Lab, tmp_path: Path) -> None:
    """Loopback has an address on every host, but connects none."""
    hosts = ",".join(names(three))
    faults = doctor(three, tmp_path, "--hosts", hosts, "--interface", "lo")
    assert set(faults) == {"interface", "ports"}
    assert "address 127.0.0.1 on 3 hosts" in faults["interface"]["why"]


def test_the_same_host_twice(three: Lab, tmp_path: Path) -> None:
    hosts = "10.77.0.1,10.77.1"  # a short form of the same address
    faults = doctor(three, tmp_path, "--hosts", hosts, "--interface", INTERFACE)
    assert set(faults) == {"machines"}
    assert "10.77.0.1 = 10.77.1 is one host" in faults["machines"]["why"]


def test_host_that_cannot_be_started(three: Lab, tmp_path: Path) -> None:
    faults = doctor(three, tmp_path, "--hosts", f"{names(three)[0]},10.77.0.9")
    assert "hosts" in faults
    assert "10.77.0.9: its probe has ended" in faults["hosts"]["why"]
