"""Network namespaces, links and a switch, made with `ip` and `tc` (ip-netns(8), tc-tbf(8)).

Each host is a network namespace. A pair of virtual Ethernet interfaces connects it to a bridge,
which is in another namespace. Existing namespaces are not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from typing import Literal

from paceline.base.errors import EnvironmentLacks
from paceline.collectives.host import wait_until
from paceline.plan.spec.values import bits_per_s
from paceline.runner.lab.record import INTERFACE, NAME_VARIABLE, Host, LabRecord

End = Literal["cable", "switch"]

_NEEDED = ("ip", "tc", "unshare", "hostname", "taskset")
_LIMIT_S = 20.0
_SEARCH_S = 5.0
_BRIDGE = "bridge0"
# What a token bucket lets pass at once: little time of the link, but at least two Ethernet frames.
# The kernel divides a segment of TCP segmentation offload that is larger than that into frames,
# which took up to 0.8 s of a core for each second of traffic. No network card makes the processor
# do that, so segments with the headers of their frames fit into the bucket.
_BURST_BYTES = 2 * 1514
_PAYLOAD = 0.9  # share of a frame that headers certainly leave
_SEGMENT_BYTES = 65536  # the largest ones of a link without a limit
_BURST_S = 0.001
_QUEUE = "50ms"


def why_not() -> str | None:
    """Return the reason why no lab can be made here; None if one can."""
    if NAME_VARIABLE in os.environ:
        # A namespace that is mounted inside of a host is invisible outside.
        return f"this is a host of lab {os.environ[NAME_VARIABLE]}, labs are made outside"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return (
            f"a lab needs {', '.join(missing)} in PATH (Debian's iproute2, util-linux and hostname)"
        )
    name = f"paceline-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except EnvironmentLacks as error:
        return f"network namespaces are not permitted here: {error}"
    delete(name)
    return None


def make(record: LabRecord) -> None:
    """Make the hosts and the switch, and limit the links if required. Raises EnvironmentLacks."""
    for namespace in (record.hub, *(host.namespace for host in record.hosts)):
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
    _run("ip", "-n", record.hub, "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "-n", record.hub, "link", "set", _BRIDGE, "up")
    for host in record.hosts:
        _plug_in(record.hub, host)
    if record.settings.bandwidth is not None:
        shape(record, record.settings.bandwidth)


def shape(record: LabRecord, rate: str | None) -> None:
    """Limit the rate of each host's link in both directions; None removes the limit.

    Both ends of the link have a token bucket. TCP retransmits what a full queue drops. tc counts
    the bytes of Ethernet frames without preamble, checksum and gap.
    """
    for host in record.hosts:
        for namespace, interface in ((host.namespace, INTERFACE), (record.hub, _port(host))):
            queue = ("ip", "netns", "exec", namespace, "tc", "qdisc")
            segment = _SEGMENT_BYTES
            if rate is None:
                with suppress(EnvironmentLacks):  # there was no limit
                    _run(*queue, "delete", "dev", interface, "root")
            else:
                bits = round(bits_per_s(rate))
                burst = max(_BURST_BYTES, round(bits / 8 * _BURST_S))
                segment = min(segment, round(burst * _PAYLOAD))
                _run(
                    *queue, "replace", "dev", interface, "root", "tbf",
                    "rate", f"{bits}bit", "burst", f"{burst}b", "latency", _QUEUE,
                )  # fmt: skip
            _run("ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(segment))


def cut(record: LabRecord, host: Host, where: End = "cable") -> None:
    """Take the host's link down, at the host's end or at the switch's end.

    The host can see the state of its own end only. No connection is refused or closed: a process
    that waits for a message continues to wait.
    """
    _set_link(record, host, where, "down")


def restore(record: LabRecord, host: Host) -> None:
    """Bring both ends of the host's link up again."""
    _set_link(record, host, "cable", "up")
    _set_link(record, host, "switch", "up")
    # A connection that is opened now would share the fate of a search for an address that began
    # during the outage. It ends after three unanswered requests (arp(7)).
    wait_until(lambda: not _searches(record, host), _SEARCH_S)


def _searches(record: LabRecord, host: Host) -> bool:
    """Tell whether a host searches for the address of another one over the link of `host`."""
    found = {
        each.number: _run("ip", "-n", each.namespace, "neigh", "show", "nud", "incomplete")
        for each in record.hosts
    }
    return bool(found.pop(host.number)) or any(host.address in text for text in found.values())


def namespaces() -> list[str]:
    """List the names of all network namespaces of this machine."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def processes_in(namespace: str) -> set[int]:
    """Return the process ids in a namespace, as this machine numbers them; none without it."""
    try:
        return {int(pid) for pid in _run("ip", "netns", "pids", namespace).split()}
    except EnvironmentLacks:
        return set()


def delete(namespace: str) -> None:
    """Delete a namespace, its interfaces and the other ends of their links."""
    with suppress(EnvironmentLacks):  # it was deleted in the meantime
        _run("ip", "netns", "delete", namespace)


def _plug_in(hub: str, host: Host) -> None:
    port = _port(host)
    _run(
        "ip", "-n", hub, "link", "add", port, "type", "veth",
        "peer", "name", INTERFACE, "netns", host.namespace,
    )  # fmt: skip
    _run("ip", "-n", hub, "link", "set", port, "master", _BRIDGE, "up")
    _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")


def _port(host: Host) -> str:
    return f"port{host.number}"


def _set_link(record: LabRecord, host: Host, where: End, state: Literal["up", "down"]) -> None:
    at_host = where == "cable"
    namespace = host.namespace if at_host else record.hub
    _run("ip", "-n", namespace, "link", "set", INTERFACE if at_host else _port(host), state)


def _run(*words: str) -> str:
    """Run a program, return its output. Raises EnvironmentLacks with its error message."""
    try:
        return subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=_LIMIT_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise EnvironmentLacks(f"`{' '.join(words)}` failed: {str(said).strip()}") from error
