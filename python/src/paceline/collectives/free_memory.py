"""Memory that this process can still get: what the kernel has, within limits of control groups.

Sources: kernel documentation, admin-guide/cgroup-v2 (memory.max), cgroup-v1/memory
(memory.limit_in_bytes); cgroups(7) and proc_pid_mountinfo(5) for the places of the files; proc(5).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_KIB = 1024
# v1 writes the largest page-aligned 64-bit number for "no limit".
_NO_LIMIT_BYTES = 2**60


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Return the memory that this process can still get, in bytes.

    The smaller of MemAvailable of /proc/meminfo and what the control groups leave.
    """
    rooms = (kernel_fields(proc / "meminfo")["MemAvailable"], memory_room_bytes(proc=proc))
    return min(room for room in rooms if room is not None)


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
