"""Hosts of a lab: namespaces, links and a switch, made with `ip` and `tc` (ip-netns(8), tc-tbf(8)).

Each host is a network namespace. A pair of virtual Ethernet interfaces connects it to a bridge,
which is in another namespace. Existing namespaces are not changed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Literal

from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.base.host.processes import command_line_of, kill_until_gone, pids_with_variable, send
from paceline.collectives.host import wait_until
from paceline.measure.records.files import write_text
from paceline.measure.records.virtual_clock import (
    DILATION_VARIABLE,
    LINK_VARIABLE,
    OWNER_VARIABLE,
    SLICES_VARIABLE,
)
from paceline.plan.spec.values import bits_per_s
from paceline.runner.lab import turns
from paceline.runner.lab.record import (
    INTERFACE,
    NAME_VARIABLE,
    Host,
    LabRecord,
    Registry,
    hub_of,
    namespaces_among,
)

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
_QUEUE_MS = 50


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

    Where hosts take turns, links are slower, and None is refused (UsageError).
    Both ends of the link have a token bucket. TCP retransmits what a full queue drops. tc counts
    the bytes of Ethernet frames without preamble, checksum and gap.
    """
    if rate is None and record.settings.turns:
        raise UsageError("a link of hosts that take turns needs a rate, for example 1gbit")
    for host in record.hosts:
        for namespace, interface in ((host.namespace, INTERFACE), (record.hub, _port(host))):
            queue = ("ip", "netns", "exec", namespace, "tc", "qdisc")
            segment = _SEGMENT_BYTES
            if rate is None:
                with suppress(EnvironmentLacks):  # there was no limit
                    _run(*queue, "delete", "dev", interface, "root")
            else:
                slowdown = record.settings.link_slowdown
                bits = round(bits_per_s(rate) / slowdown)
                queue_time = f"{_QUEUE_MS * slowdown:g}ms"
                burst = max(_BURST_BYTES, round(bits / 8 * _BURST_S * slowdown))
                segment = min(segment, round(burst * _PAYLOAD))
                _run(
                    *queue, "replace", "dev", interface, "root", "tbf",
                    "rate", f"{bits}bit", "burst", f"{burst}b", "latency", queue_time,
                )  # fmt: skip
            _run("ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(segment))
    if rate is not None and record.settings.turns:
        _enlarge_buffers(record, bits_per_s(rate))


def _enlarge_buffers(record: LabRecord, rate_bits_per_s: float) -> None:
    """Let sockets hold what their links carry while their host is frozen, twice.

    The kernel sends and receives for a frozen host as long as there is room (tcp(7)).
    """
    settings = record.settings
    round_s = settings.link_slowdown * settings.slice_ms / 1000
    frozen_s = round_s - settings.slice_ms / 1000
    needed = round(2 * rate_bits_per_s / settings.link_slowdown / 8 * frozen_s)
    for host in record.hosts:
        for name in ("tcp_rmem", "tcp_wmem"):
            place = f"/proc/sys/net/ipv4/{name}"
            enter = ("ip", "netns", "exec", host.namespace)
            least, default, most = _run(*enter, "cat", place).split()
            sizes = f"{least} {default} {max(int(most), needed)}"
            _run(*enter, "sh", "-c", f"echo {sizes} > {place}")


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


# --- the files of a lab: programs that run a command on a host, and the host list of mpirun ------

# With these options a killed JVM leaves no file in /tmp, and its start takes half the CPU time.
_JVM = "-XX:-UsePerfData -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

# The master stops using a host this long after its last heartbeat. Spark's default is a minute, in
# which it may start executors there. Workers report four times in it.
_WORKER_TIMEOUT_S = 20


def write_programs(record: LabRecord) -> None:
    """Make the folders and the files of the lab, except logs."""
    folder = Path(record.folder)
    folder.mkdir(
        mode=0o700
    )  # an error if it exists, because the end of the lab removes it with its content
    Path(record.logs).mkdir(parents=True, exist_ok=True)
    for host in record.hosts:
        host.temporary.mkdir(parents=True)
        write_text(host.entrance, entrance(record, host))
    write_text(record.hostfile, hostfile(record))
    write_text(record.agent, agent(record))
    record.agent.chmod(0o755)


def entrance(record: LabRecord, host: Host) -> str:
    """Return a shell script that runs its arguments, or a shell, on the host."""
    words = ["ip", "netns", "exec", host.namespace, "unshare", "--uts"]
    if host.cores:
        words += ["taskset", "--cpu-list", ",".join(map(str, host.cores))]
    settings = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in environment(record, host).items()
    )
    settings += "".join(
        f'export {name}="${{{name}:-}} "{shlex.quote(value)}\n'
        for name, value in jvm_options(host, record.settings.dilation).items()
    )
    joining = ""
    if record.settings.turns:
        # before all else: what a process does outside of its group takes no turns
        joining = turns.joining(record.guardian, host.namespace)
    return (
        f"#!/bin/sh\n# Runs a command on host {host.name} of lab {record.name}.\n"
        f"{joining}{settings}"
        f'[ $# -gt 0 ] || set -- "${{SHELL:-sh}}"\n'
        f'exec {shlex.join(words)} sh -c \'hostname {host.name} && exec "$@"\' sh "$@"\n'
    )


def environment(record: LabRecord, host: Host) -> dict[str, str]:
    """Return the variables of processes on the host.

    They hold the paths and addresses of the lab, and settings with which Spark and MPI need
    neither a name service nor ssh.
    """
    temporary = str(host.temporary)
    found = {
        "TMPDIR": temporary,
        NAME_VARIABLE: record.name,
        "PACELINE_LAB_HOSTS": ",".join(host.address for host in record.hosts),
        "PACELINE_LAB_INTERFACE": INTERFACE,
        "PACELINE_LAB_HOSTFILE": str(record.hostfile),
        "PACELINE_LAB_AGENT": str(record.agent),
        "SPARK_LOCAL_HOSTNAME": host.address,
        "SPARK_LOCAL_DIRS": temporary,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # mpirun of Open MPI 5, Open MPI 4 and MPICH
        "PRTE_MCA_plm_ssh_agent": str(record.agent),
        "OMPI_MCA_plm_rsh_agent": str(record.agent),
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(record.agent),
        "PRTE_MCA_prte_if_include": INTERFACE,
        "OMPI_MCA_btl_tcp_if_include": INTERFACE,
    }
    if record.owner is not None:
        found[OWNER_VARIABLE] = str(record.owner.pid)
    if record.settings.bandwidth is not None:
        found[LINK_VARIABLE] = record.settings.bandwidth
    if record.settings.spark:
        found["PACELINE_LAB_SPARK_MASTER"] = record.spark_master
    if record.settings.turns:
        found[DILATION_VARIABLE] = str(record.settings.dilation)
        found[SLICES_VARIABLE] = str(record.slices)
    return found


def jvm_options(host: Host, dilation: int = 1) -> dict[str, str]:
    """Return the variables with options of JVMs on the host; a user's own options come first."""
    folder = f"-Djava.io.tmpdir={host.temporary}"
    limit = f"-Dspark.worker.timeout={_WORKER_TIMEOUT_S * dilation}"
    return {
        "SPARK_SUBMIT_OPTS": f"-XX:-UsePerfData {folder}",
        "SPARK_DAEMON_JAVA_OPTS": f"{_JVM} {limit} {folder}",
    }


def hostfile(record: LabRecord) -> str:
    slots = record.settings.slots_per_host()
    return "".join(f"{host.address} slots={slots}\n" for host in record.hosts)


def agent(record: LabRecord) -> str:
    """Return a shell script that replaces ssh: `agent [-x] ADDRESS COMMAND…`, as MPICH calls it."""
    cases = "".join(
        f'{host.address}) exec {shlex.join(host.command("sh", "-c"))} "$*" ;;\n'
        for host in record.hosts
    )
    skip_option = '[ "$1" = -x ] && shift\n'
    return f"#!/bin/sh\n{skip_option}address=$1\nshift\ncase $address in\n{cases}esac\nexit 1\n"


# --- removal of a lab in any state: its processes, namespaces and files --------------------------

_TERMINATION_S = 3.0
_KILL_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Open MPI keeps segments, shm_overview(7))
FOLDER_PREFIX = "paceline-lab."


def remove(name: str, registry: Registry, *, token: str | None = None) -> bool:
    """Remove everything of the lab; return False if there was nothing.

    token: remove only the lab with this token, not a later lab of the same name.
    Raises TimedOut if its processes cannot be ended.
    """
    with registry.locked():
        record = registry.load(name)
        if token is not None and (record is None or record.token != token):
            return False
        return _remove(name, record, registry)


def remove_abandoned(registry: Registry) -> list[str]:
    """Remove labs whose owner was killed; return their names. The caller holds the lock."""
    found = [name for name in registry.names() if is_abandoned(registry.load(name))]
    for name in found:
        _remove(name, registry.load(name), registry)
    return found


def is_abandoned(record: LabRecord | None) -> bool:
    """Check if no process will remove the lab, because its owner or the machine was stopped."""
    if record is None:
        return True
    if record.owner is not None:
        return not record.owner.is_alive()
    return hub_of(record.name) not in namespaces()


def _remove(name: str, record: LabRecord | None, registry: Registry) -> bool:
    spaces = namespaces_among(namespaces(), name)
    groups = _groups(record, spaces, name)
    turns.stop(name, groups)  # a frozen process ignores signals
    _end_processes(name, spaces)
    for namespace in spaces:
        delete(namespace)
    _end_processes(name, [])  # some may have been about to enter a namespace
    turns.delete_groups(groups)
    if record is not None:
        _delete_files(record)
    known = registry.file(name).exists()
    registry.forget(name)
    return bool(spaces) or known


def _groups(record: LabRecord | None, spaces: list[str], name: str) -> list[str]:
    """Return the names of control groups that the lab may have."""
    hosts = [namespace for namespace in spaces if namespace != hub_of(name)]
    return hosts if record is None else record.groups


def _end_processes(name: str, spaces: list[str]) -> None:
    """Send SIGTERM, so that Spark and MPI clean up, then SIGKILL."""

    def alive() -> set[int]:
        inside = {pid for namespace in spaces for pid in processes_in(namespace)}
        return inside | pids_with_variable(NAME_VARIABLE, name)

    asked = alive()
    send(asked, signal.SIGTERM)
    if asked:
        wait_until(lambda: not alive(), _TERMINATION_S, poll_s=0.1)
    if not kill_until_gone(alive, _KILL_S):
        names = {pid: " ".join(command_line_of(pid))[:80] for pid in alive()}
        raise TimedOut(
            f"processes of a lab are alive {_KILL_S:g} s after SIGKILL: {names}; find out what "
            "they wait for (`cat /proc/PID/stack`), then repeat the command"
        )


def _delete_files(record: LabRecord) -> None:
    folder = Path(record.folder)
    if folder.name == f"{FOLDER_PREFIX}{record.name}" and folder.is_dir():
        shutil.rmtree(folder)
    for segment in segments(record):
        segment.unlink(missing_ok=True)


def segments(record: LabRecord) -> list[Path]:
    """List shared memory of killed ranks; Open MPI names it sm_segment.HOST.UID.JOB.RANK."""
    return [file for host in record.hosts for file in _SHARED_MEMORY.glob(f"*.{host.name}.*")]
