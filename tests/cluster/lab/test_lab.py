"""Hosts, links and the end of a lab, with real namespaces; no training."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.cluster.lab.labs import checked_lab, traces_of
from tests.support.commands import run_command

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.base.host.processes import is_alive
from paceline.collectives.host import wait_until
from paceline.runner.lab import INTERFACE, Host, Lab, LabSettings, network
from paceline.runner.lab.network import processes_in

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab")]

LIMIT_S = 30
# Says where it runs, as one line of JSON.
WHERE = """
import fcntl, json, os, socket, struct
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("16s16x", b"eth0"))
print(json.dumps({
    "name": socket.gethostname(),
    "address": socket.inet_ntoa(asked[20:24]),
    "cores": sorted(os.sched_getaffinity(0)),
    "interfaces": sorted(name for _, name in socket.if_nameindex()),
    "temporary": __import__("tempfile").gettempdir(),
}))
"""
# Takes a connection, says "ready" before, and how many bytes came, and in what time.
RECEIVE = """
import json, socket, time
listener = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
listener.settimeout(20)
peer, _ = listener.accept()
peer.settimeout(20)
started, count = time.monotonic(), 0
while data := peer.recv(1 << 20):
    count += len(data)
print(json.dumps({"bytes": count, "seconds": time.monotonic() - started}))
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 20)
except OSError as error:
    print(type(error).__name__)
"""
UNREACHABLE = 3
SEND = f"""
import socket, sys
try:
    peer = socket.create_connection((sys.argv[1], 5000), 2)
except OSError:  # no answer in time, or no host that says it has the address
    sys.exit({UNREACHABLE})
peer.sendall(bytes(int(sys.argv[2])))
peer.close()
"""

# A host can crash another one, as `paceline run` does.
OUTAGE = """
import sys
from paceline.runner.lab import session
lab = session.own_lab()
getattr(session, sys.argv[1])(lab, lab.hosts[1])
"""


def python(host: Host, program: str, *words: object) -> subprocess.CompletedProcess[str]:
    return run_command(host.command(sys.executable, "-c", program, *words), LIMIT_S)


def answer(host: Host, program: str, *words: object) -> Any:
    done = python(host, program, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def transfer(lab: Lab, count: int) -> dict[str, Any] | None:
    """Send bytes from the second host to the first; None if they do not get through."""
    first, second = lab.hosts[:2]
    receiver = subprocess.Popen(
        first.command(sys.executable, "-c", RECEIVE), stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sent = python(second, SEND, first.address, count)
        if sent.returncode == UNREACHABLE:
            return None
        assert sent.returncode == 0, sent.stderr
        found: dict[str, Any] = json.loads(receiver.communicate(timeout=LIMIT_S)[0])
        return found
    finally:
        receiver.kill()
        receiver.communicate(timeout=LIMIT_S)


def interfaces_outside() -> set[str]:
    """Return the names of this machine's interfaces outside of all labs."""
    return {name for _, name in socket.if_nameindex()}


@pytest.fixture(scope="module")
def pair() -> Iterator[Lab]:
    cores = 1 if len(os.sched_getaffinity(0)) >= 2 else None
    # Other programs may add interfaces meanwhile, but not with these names.
    own = {INTERFACE, "bridge0", "port0", "port1"}
    before = interfaces_outside()
    with checked_lab(LabSettings(hosts=2, cores=cores)) as lab:
        assert set(lab_namespaces(lab)) <= set(network.namespaces())
        yield lab
        assert (interfaces_outside() - before).isdisjoint(own)
    assert (interfaces_outside() - before).isdisjoint(own)
    assert set(lab_namespaces(lab)).isdisjoint(network.namespaces())


def lab_namespaces(lab: Lab) -> list[str]:
    return [lab.record.hub, *(host.namespace for host in lab.hosts)]


def test_each_host_has_a_name_an_address_cores_and_a_temporary_folder_of_its_own(
    pair: Lab,
) -> None:
    found = [answer(host, WHERE) for host in pair.hosts]
    names = [f"{pair.record.name}-0", f"{pair.record.name}-1"]
    assert [told["name"] for told in found] == names
    assert [told["address"] for told in found] == ["10.77.0.1", "10.77.0.2"]
    assert all(told["interfaces"] == [INTERFACE, "lo"] for told in found)
    assert len({told["temporary"] for told in found}) == 2
    here = sorted(os.sched_getaffinity(0))
    expected = [[here[0]], [here[1]]] if len(here) >= 2 else [here, here]
    assert [told["cores"] for told in found] == expected


def test_links_take_as_long_as_they_were_shaped_for(pair: Lab) -> None:
    pair.shape("16mbit")
    try:
        slow = transfer(pair, 1_000_000)
    finally:
        pair.shape(None)
    assert slow is not None
    assert slow["bytes"] == 1_000_000
    # 8 Mbit less what the two buckets hold at first (128 KiB each), at 16 Mbit/s
    assert slow["seconds"] > (1_000_000 - 2 * 131072) * 8 / 16e6
    fast = transfer(pair, 1_000_000)
    assert fast is not None
    assert fast["seconds"] < slow["seconds"] / 2


def packets_sent(host: Host) -> int:
    """Return what the host's interface has handed over, a segment as one packet."""
    counter = f"/sys/class/net/{INTERFACE}/statistics/tx_packets"
    return int(answer(host, f"print(open({counter!r}).read())"))


def test_limited_link_takes_no_processor_time_to_divide_segments_into_frames(pair: Lab) -> None:
    pair.shape("500mbit")
    before = packets_sent(pair.hosts[1])
    try:
        sent = transfer(pair, 4_000_000)
    finally:
        pair.shape(None)
    assert sent is not None
    frames = 4_000_000 / 1448  # bytes of TCP in an Ethernet frame
    assert packets_sent(pair.hosts[1]) - before < frames / 4


@pytest.mark.parametrize("where", ["cable", "switch"])
def test_cut_link_carries_nothing_until_it_is_restored(
    pair: Lab, where: Literal["cable", "switch"]
) -> None:
    assert transfer(pair, 10) is not None
    second = pair.hosts[1]
    pair.cut(second, where)
    assert transfer(pair, 10) is None
    pair.restore(second)
    # the other end of a cable that was down is taken up a moment later
    assert wait_until(lambda: transfer(pair, 10) is not None, LIMIT_S)


def test_connection_after_an_outage_does_not_fail_with_one_that_was_tried_in_it(pair: Lab) -> None:
    first, second = pair.hosts
    connect = second.command(sys.executable, "-c", CONNECT, first.address)
    pair.cut(second, "switch")
    with subprocess.Popen(connect, stdout=subprocess.DEVNULL):
        # The search for the address, which waiting connections fail with, takes three seconds.
        time.sleep(2.6)
        pair.restore(second)
        found = subprocess.run(connect, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert found.stdout.strip() == "ConnectionRefusedError", "the host was reached"


def test_host_that_crashes_has_no_link_until_it_boots_without_its_processes(pair: Lab) -> None:
    first, second = pair.hosts
    with subprocess.Popen(second.command("sleep", LIMIT_S)) as sleeper:
        assert wait_until(lambda: bool(processes_in(second.namespace)), LIMIT_S)
        assert python(first, OUTAGE, "crash").returncode == 0
        assert transfer(pair, 10) is None
        assert sleeper.poll() is None
        assert python(first, OUTAGE, "boot").returncode == 0
        assert sleeper.wait(LIMIT_S) == -signal.SIGKILL
    assert wait_until(lambda: transfer(pair, 10) is not None, LIMIT_S)


def test_labs_side_by_side_do_not_meet(pair: Lab) -> None:
    with checked_lab(LabSettings(hosts=2)) as other:
        assert [host.address for host in other.hosts] == [host.address for host in pair.hosts]
        assert {host.name for host in other.hosts}.isdisjoint(h.name for h in pair.hosts)
        other.cut(other.hosts[0])
        assert transfer(pair, 10) is not None
        assert transfer(other, 10) is None
    assert transfer(pair, 10) is not None


def test_name_that_is_up_is_refused_and_its_lab_stays(pair: Lab) -> None:
    with pytest.raises(UsageError, match=f"{pair.record.name}' is up already"):
        Lab(LabSettings(hosts=1), name=pair.record.name).make()
    assert transfer(pair, 10) is not None


# Leaves a grandchild in a session of its own that does not want to end.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("/dev/shm/sm_segment." + os.uname().nodename + ".0.1.0", "w").close()
child = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"],
                         start_new_session=True)
print(child.pid, flush=True)
"""


def test_end_of_a_lab_ends_processes_that_would_rather_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.runner.lab.network._TERMINATION_S", 0.2)
    with checked_lab(LabSettings(hosts=1)) as lab:
        pid = int(python_line(lab.hosts[0], STUBBORN))
        assert processes_in(lab.hosts[0].namespace) >= {pid}
    assert not is_alive(pid)


def test_end_of_a_lab_ends_what_has_left_its_namespace() -> None:
    with checked_lab(LabSettings(hosts=1)) as lab:
        [host] = lab.hosts
        leave = f"nsenter --net=/proc/{os.getpid()}/ns/net sh -c 'echo $$; exec sleep 1000' &"
        process = subprocess.Popen(
            host.command("sh", "-c", leave), stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout as output:
            pid = int(output.readline())
        assert process.wait(timeout=LIMIT_S) == 0
        assert pid not in processes_in(host.namespace)
    assert not is_alive(pid)


def python_line(host: Host, program: str) -> str:
    """The first line that a program writes, whatever it leaves running."""
    process = subprocess.Popen(
        host.command(sys.executable, "-c", program), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline()
    process.wait(timeout=LIMIT_S)
    return line


def test_spark_that_does_not_start_is_told_with_its_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.12-3.5.9.jar").touch()
    for name in ("spark-submit", "spark-class"):
        (programs / name).write_text("#!/bin/sh\necho no room in $TMPDIR >&2\nexit 9\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    lab = Lab(LabSettings(hosts=1, spark=True), logs=tmp_path / "logs")
    with pytest.raises(EnvironmentLacks, match=r"master ended with 9:\nno room in ") as raised:
        lab.make()
    assert str(tmp_path / "logs" / "master.log") in str(raised.value)
    assert traces_of(lab.record) == []


def test_making_starts_no_earlier_than_the_record_is_kept(tmp_path: Path) -> None:
    """A folder of that name that was there stays what it was."""
    lab = Lab(LabSettings(hosts=1))
    folder = Path(lab.record.folder)
    folder.mkdir()
    try:
        (folder / "mine").touch()
        with pytest.raises(EnvironmentLacks, match="expected nothing there"):
            lab.make()
        assert (folder / "mine").exists()
        (folder / "mine").unlink()
    finally:
        folder.rmdir()
    assert traces_of(lab.record) == []


def test_lab_that_is_left_stays_until_it_is_closed() -> None:
    lab = Lab(LabSettings(hosts=1))
    lab.make()
    try:
        lab.leave()
        other = Lab(LabSettings(hosts=1))
        assert lab.record.name not in other.make(), "it is not abandoned"
        other.close()
        assert answer(lab.hosts[0], WHERE)["name"] == lab.hosts[0].name
    finally:
        lab.close()
    assert traces_of(lab.record) == []
