"""Facts about this host that ranks need: its name, network, processes and free memory.

Processes are known from /proc (proc(5)), interfaces from ioctl (netdevice(7)). Free memory is what
the kernel has, within the limits of control groups: kernel documentation, admin-guide/cgroup-v2
(memory.max), cgroup-v1/memory (memory.limit_in_bytes); cgroups(7) and proc_pid_mountinfo(5) for the
places of the files.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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


_KIB = 1024
# v1 writes the largest page-aligned 64-bit number for "no limit".
_NO_LIMIT_BYTES = 2**60


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Return the memory that this process can still get, in bytes.

    The smaller of MemAvailable of /proc/meminfo and what the control groups leave.
    """
    rooms = (kernel_fields(proc / "meminfo")["MemAvailable"], memory_room_bytes(proc=proc))
    return min(room for room in rooms if room is not None)


def kills_for_memory(proc: Path = Path("/proc")) -> int:
    """Return how many processes the kernel has ended for lack of memory since the machine started;
    0 where it does not say so.
    """
    rows = (line.split() for line in (proc / "vmstat").read_text().splitlines())
    return next((int(row[1]) for row in rows if row[0] == "oom_kill"), 0)


def kernel_fields(path: Path) -> dict[str, int]:
    """Return the fields of a file of /proc that are in kB, in bytes."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {r[0].rstrip(":"): _KIB * int(r[1]) for r in rows if len(r) == 3 and r[2] == "kB"}


def memory_room_bytes(pid: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """Return the bytes that the groups of `pid` still allow; None without a limit.

    Page cache that the kernel can free counts as free.
    """
    rooms = [
        max(0, limit - _memory_used(folder) + _file_cache(folder / "memory.stat"))
        for folder in ControlGroups(pid, proc).folders("memory")
        for limit in memory_limit(folder)
    ]
    return min(rooms, default=None)


class ControlGroups:
    """Control groups of one process."""

    def __init__(self, pid: int | str, proc: Path) -> None:
        self._mounts = list(_mounts(proc / str(pid) / "mountinfo"))
        self._groups = list(_groups(proc / str(pid) / "cgroup"))

    def folders(self, controller: str) -> list[Path]:
        """Return the groups whose limits for `controller` apply, from the process's own upwards."""
        return [
            folder
            for controllers, path in self._groups
            for mount in self._mounts
            if mount.has(controller, controllers)
            for folder in mount.folders(path)
        ]


class _Mount(NamedTuple):
    version: int
    controllers: frozenset[str]  # v1 only
    root: PurePosixPath  # the part of the hierarchy that is mounted
    point: Path

    def has(self, controller: str, controllers: frozenset[str]) -> bool:
        """Return whether it limits `controller` for a group with these controllers (v2: none)."""
        if self.version == 2:
            return not controllers
        return controller in controllers & self.controllers

    def folders(self, group: PurePosixPath) -> Iterator[Path]:
        """Yield the folder of a group, then those of its ancestors.

        In a container the group may name the host's hierarchy, of which only our own part is
        mounted: then the mount's root is our group.
        """
        inside = group.relative_to(self.root) if group.is_relative_to(self.root) else None
        own = self.point / inside if inside and (self.point / inside).is_dir() else self.point
        yield own
        yield from (folder for folder in own.parents if folder.is_relative_to(self.point))


def _mounts(mountinfo: Path) -> Iterator[_Mount]:
    for line in readable_text(mountinfo).splitlines():
        place, separator, kind = line.partition(" - ")
        fields, about = place.split(), kind.split()
        if not separator or len(fields) < 5 or len(about) < 3:
            continue
        root, point = PurePosixPath(fields[3]), Path(fields[4].replace(r"\040", " "))
        if about[0] == "cgroup2":
            yield _Mount(2, frozenset(), root, point)
        elif about[0] == "cgroup":
            yield _Mount(1, frozenset(about[2].split(",")), root, point)


def _groups(cgroup: Path) -> Iterator[tuple[frozenset[str], PurePosixPath]]:
    """Yield (controllers, path) for each line; no controllers for v2."""
    for line in readable_text(cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        yield frozenset(filter(None, controllers.split(","))), PurePosixPath(path)


def memory_limit(folder: Path) -> Iterator[int]:
    """Yield the memory limit of a group, if it has one."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = readable_text(folder / name).strip()
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            yield int(text)


def _memory_used(folder: Path) -> int:
    texts = (readable_text(folder / name) for name in ("memory.current", "memory.usage_in_bytes"))
    return next((int(text) for text in texts if text.strip().isdigit()), 0)


def _file_cache(memory_stat: Path) -> int:
    """Return the page cache that the kernel can free, of the group and the groups below it:
    inactive_file in v2, total_inactive_file in v1."""
    names = ("inactive_file ", "total_inactive_file ")
    lines = readable_text(memory_stat).splitlines()
    return max((int(line.split()[1]) for line in lines if line.startswith(names)), default=0)


def readable_text(path: Path | None) -> str:
    """Return the file's text; empty if there is none, or if it may not be read."""
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
