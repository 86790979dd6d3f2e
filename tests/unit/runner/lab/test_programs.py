"""How hosts are entered, with `ip` and the like replaced by what runs the rest of their words."""

from __future__ import annotations

import os
import subprocess

import pytest

from paceline.runner.lab import LabSettings, network
from paceline.runner.lab.session import Lab

LIMIT_S = 20
# ip netns exec NAME words…; unshare --uts words…; taskset --cpu-list LIST words…
FAKES = {
    "ip": 'namespace=$3; shift 3; FAKE_NAMESPACE=$namespace exec "$@"',
    "unshare": 'shift; exec "$@"',
    "taskset": 'FAKE_CORES=$2; export FAKE_CORES; shift 2; exec "$@"',
    "hostname": ":",
}


@pytest.fixture
def record(monkeypatch, tmp_path):
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, body in FAKES.items():
        (bin_dir / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin_dir / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    parent = tmp_path / "it's a folder"
    parent.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(parent))
    here = len(os.sched_getaffinity(0))
    made = Lab(LabSettings(hosts=2, cores=1 if here > 1 else None, slots=3), name="some").record
    network.write_programs(made)
    return made


def output(*words):
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout


def test_words_reach_a_host_as_they_were_said(record):
    words = ["a b", "it's", "$HOME", "*", '"']
    assert output(*record.hosts[1].command("printf", "%s\n", *words)).splitlines() == words


def test_host_is_entered_in_its_namespace_with_its_cores_and_settings(record):
    host = record.hosts[1]
    said = output(*host.command("env"))
    found = dict(line.partition("=")[::2] for line in said.splitlines())
    assert found["FAKE_NAMESPACE"] == "paceline-some-1"
    assert found.get("FAKE_CORES", "") == ",".join(map(str, host.cores))
    assert found["SPARK_LOCAL_HOSTNAME"] == "10.77.0.2"
    assert found["TMPDIR"] == str(host.temporary)
    assert found["PACELINE_LAB_HOSTFILE"] == str(record.hostfile)
    assert "PACELINE_LAB_SPARK_MASTER" not in found


def test_options_of_jvms_follow_those_of_the_user(record, monkeypatch):
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dmine='a b'")
    [host, _] = record.hosts
    shown = [output(*host.command("printenv", f"SPARK_{kind}")).strip()
             for kind in ("SUBMIT_OPTS", "DAEMON_JAVA_OPTS")]  # fmt: skip
    assert shown[0] == f"-Dmine='a b' -XX:-UsePerfData -Djava.io.tmpdir={host.temporary}"
    assert shown[1].endswith(f"-Djava.io.tmpdir={host.temporary}")


def test_agent_runs_a_command_line_on_the_host_of_the_address_as_ssh_would(record):
    line = "echo \"$FAKE_NAMESPACE\" 'a  b' ; x=1 ; echo $x"
    said = output(record.agent, "10.77.0.2", *line.split(" "))
    assert said.splitlines() == ["paceline-some-1 a  b", "1"]
    assert (
        output(record.agent, "-x", "10.77.0.1", "echo", "as", "MPICH", "does") == "as MPICH does\n"
    )


def test_agent_knows_no_other_address(record):
    command = [record.agent, "10.77.0.9", "true"]
    assert subprocess.run(command, timeout=LIMIT_S, check=False).returncode == 1


def test_host_list_offers_the_slots(record):
    assert record.hostfile.read_text() == "10.77.0.1 slots=3\n10.77.0.2 slots=3\n"


def test_status_of_a_command_is_that_of_the_host(record):
    command = record.hosts[0].command("sh", "-c", "exit 9")
    assert subprocess.run(command, timeout=LIMIT_S, check=False).returncode == 9
