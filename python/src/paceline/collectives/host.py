"""Facts about this host that ranks need to find each other: its name, network and processes.

Processes are known from /proc (proc(5)), interfaces from ioctl (netdevice(7)).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from paceline.collectives.errors import EnvironmentLacks

PROC = Path("/proc")
LOOPBACK = "lo"
_BACKLOG = 1024
UNKNOWN_BOOT = "unknown"
_TICKS_PER_S, _PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_ANY_PORT = 9  # a datagram socket has to be connected to some port
# linux/sockios.h, linux/if.h
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_RUNNING = 0x40
_NAME_BYTES = 16  # of an interface, with the zero byte at its end


def host_name() -> str:
    return socket.gethostname()


def host_identity() -> str:
    """Return a text that is equal for processes that may share memory: the same start of the
    kernel, network and name."""
    network = Path("/proc/self/ns/net").readlink()
    return f"{boot_id()} {network} {host_name()}"


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface, by its name as `ip addr` shows it.

    Raises EnvironmentLacks, with the existing interfaces, if it has none.
    """
    found = _ask_interface(interface, _SIOCGIFADDR)
    if found is None:
        existing = ", ".join(name for _, name in socket.if_nameindex())
        raise EnvironmentLacks(
            f"interface {interface!r} on host {host_name()}: expected one with an IPv4 address; "
            f"interfaces here: {existing}; name one of them with [network] interface"
        )
    return socket.inet_ntoa(found[4:8])  # of a struct sockaddr_in


def listening_socket(interface: str) -> socket.socket:
    """Return a socket that listens on a free port of the interface's address only.

    Raises EnvironmentLacks if the interface has no address.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((interface_address(interface), 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def address_towards(host: str) -> str:
    """Return the address from which this host sends to another one; sends nothing. Raises
    OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))  # looks up the route
        return str(probe.getsockname()[0])


def has_link(interface: str) -> bool:
    """Return whether the network interface exists, is up, and has a carrier."""
    found = _ask_interface(interface, _SIOCGIFFLAGS)
    return found is not None and bool(struct.unpack_from("H", found)[0] & _IFF_RUNNING)


def _ask_interface(interface: str, request: int) -> bytes | None:
    """Return what the kernel answers about an interface; None if it is unknown or has no such
    value."""
    name = os.fsencode(interface)
    if len(name) >= _NAME_BYTES:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, request, struct.pack("16s24x", name))  # struct ifreq
        except OSError:
            return None
    return answer[_NAME_BYTES:]


@dataclass(frozen=True, slots=True)
class Stat:
    """Figures of /proc/PID/stat (proc_pid_stat(5)), as of one moment."""

    is_running: bool  # False for a zombie: it has ended, and its parent has not collected it yet
    parent: int
    start_ticks: int  # clock ticks since boot; with the process id, it identifies the process
    cpu_s: float  # of all threads, and of the children that the process has waited for
    threads: int
    rss_bytes: int

    @property
    def started_unix_s(self) -> float:
        """Return the start time, to about 10 ms.

        psutil's is up to a second off, because it adds the ticks to a boot time in whole seconds.
        """
        since_boot_s = self.start_ticks / _TICKS_PER_S
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def read_stat(pid: int, proc: Path = PROC) -> Stat | None:
    """Read /proc/PID/stat; None if there is no such process."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:  # noqa: PTH123  (each second, each process)
            # The name in brackets may contain anything. The third field, the state, follows it.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Stat(
        is_running=fields[0] not in (b"Z", b"X"),
        parent=int(fields[1]),
        start_ticks=int(fields[19]),
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
        threads=int(fields[17]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


@cache
def boot_id() -> str:
    """Return the identifier of the machine's current boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return UNKNOWN_BOOT


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a process on this machine.

    The start distinguishes it from a later process with its pid. It is counted from the boot, so a
    step of the wall clock changes nothing.
    """

    pid: int
    start_ticks: int  # clock ticks since boot
    boot_id: str = field(default_factory=boot_id)

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the identity of `pid`; None if there is no such process."""
        stat = read_stat(pid)
        return None if stat is None else cls(pid, stat.start_ticks)

    @classmethod
    def current(cls) -> Process:
        process = cls.of(os.getpid())
        assert process is not None, "this process exists"
        return process

    def is_alive(self) -> bool:
        stat = read_stat(self.pid)
        return (
            stat is not None
            and stat.is_running
            and (stat.start_ticks, boot_id()) == (self.start_ticks, self.boot_id)
        )


def wait_until(condition: Callable[[], bool], limit_s: float, poll_s: float = 0.05) -> bool:
    """Poll `condition` for at most `limit_s`; return whether it became true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
