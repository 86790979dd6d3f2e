"""Several hosts on one machine: network namespaces on a bridge of their own.

Each process of a host runs under a UTS namespace with the host's name, for by equal names Open MPI
would take two hosts for one. Nothing outside the namespaces is touched, and with them all is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INTERFACE = "eth0"
_NEEDED = ("ip", "unshare")


@dataclass(frozen=True)
class Host:
    """A namespace with one interface beside loopback."""

    name: str
    address: str
    namespace: str

    def command(self, *words: object) -> list[str]:
        """What runs `words` on this host."""
        inside = f'hostname {self.name}; exec "$@"'
        return [
            "ip", "netns", "exec", self.namespace,
            "unshare", "--uts", "sh", "-c", inside, "sh", *map(str, words),
        ]  # fmt: skip


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    name = f"pcl-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts that reach one another over INTERFACE, and nobody else."""
    prefix = f"pcl-{os.getpid()}"
    hub = f"{prefix}-hub"
    made = [Host(f"host{i}", f"10.77.0.{i + 1}", f"{prefix}-{i}") for i in range(count)]
    namespaces = [hub, *(host.namespace for host in made)]
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for number, host in enumerate(made):
            _plug(hub, host, f"port{number}")
        yield made
    finally:
        for namespace in namespaces:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", namespace)


def shape(made: list[Host], rate: str) -> None:
    """Limit what each host sends, and what it receives, to `rate` as tc writes it: "1gbit".

    A token bucket at both ends of each host's cable; what a full queue drops, TCP sends again.
    tc counts the bytes of Ethernet frames without preamble, checksum and gap.
    """
    hub = made[0].namespace.rpartition("-")[0] + "-hub"
    for number, host in enumerate(made):
        for namespace, interface in ((host.namespace, INTERFACE), (hub, f"port{number}")):
            _run(
                "ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", interface,
                "root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms",
            )  # fmt: skip


def cut(host: Host, where: Literal["cable", "switch"] = "cable") -> None:
    """Take the host's link down for good: at its own end, or at the other, which it only feels.

    Either way nothing is refused or closed: whoever waits for a message waits on.
    """
    if where == "cable":
        _ip("-n", host.namespace, "link", "set", INTERFACE, "down")
    else:
        hub, _, number = host.namespace.rpartition("-")
        _ip("-n", f"{hub}-hub", "link", "set", f"port{number}", "down")


def processes_on(host: Host) -> set[int]:
    """Those of the host, as process ids of this machine."""
    found = subprocess.run(
        ["ip", "netns", "pids", host.namespace], check=True, capture_output=True, timeout=20
    )
    return {int(pid) for pid in found.stdout.split()}


def write_agent(made: list[Host], file: Path) -> Path:
    """A program that mpirun calls as it would call ssh: `file ADDRESS COMMAND…`."""
    cases = "\n".join(
        f"{host.address}) exec {' '.join(host.command()[:8])} "
        f'\'hostname {host.name}; eval "$*"\' sh "$@" ;;'
        for host in made
    )
    file.write_text(f"#!/bin/sh\naddress=$1\nshift\ncase $address in\n{cases}\nesac\nexit 1\n")
    file.chmod(0o755)
    return file


def _plug(hub: str, host: Host, port: str) -> None:
    _ip(
        "-n", hub, "link", "add", port, "type", "veth",
        "peer", "name", INTERFACE, "netns", host.namespace,
    )  # fmt: skip
    _ip("-n", hub, "link", "set", port, "master", "bridge0", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip("-n", host.namespace, "link", "set", INTERFACE, "up")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)
