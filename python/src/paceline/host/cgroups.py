"""CPU and memory limits of a process's control group, v1 and v2, and the files with its usage.

psutil and os.cpu_count report the figures of the host instead (giampaolo/psutil#2100).

Sources: kernel documentation, admin-guide/cgroup-v2 (cpu.max, memory.max), cgroup-v1/memory
(memory.limit_in_bytes), scheduler/sched-bwc (cpu.cfs_quota_us, cpu.cfs_period_us); cgroups(7) and
proc_pid_mountinfo(5) for the places of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

N = TypeVar("N", int, float)

# v1 writes the largest page-aligned 64-bit number for "no limit".
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Tightest limits from the process's group up to the root; None means no limit."""

    cpus: float | None  # cores
    memory_bytes: int | None

    @property
    def words(self) -> str:
        """The limits for a table; empty without any."""
        found = [] if self.cpus is None else [f"{self.cpus:g} cores"]
        found += [] if self.memory_bytes is None else [f"{self.memory_bytes / 2**30:.1f} GiB"]
        return ", ".join(found)


@dataclass(frozen=True, slots=True)
class CgroupPlaces:
    """Files with the usage of the group that has the tightest limit, or of the process's own group
    without a limit; None if there is no such file."""

    limits: CgroupLimits
    cpu_time: Path | None  # cpu.stat (v2) or cpuacct.usage (v1)
    throttling: Path | None  # cpu.stat of both
    memory: Path | None  # memory.current (v2) or memory.usage_in_bytes (v1)


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


def read_limits(pid: int | str = "self", proc: Path = Path("/proc")) -> CgroupLimits:
    """Return the limits of `pid`; all None without control groups or limits."""
    return find_places(pid, proc).limits


def find_places(pid: int | str = "self", proc: Path = Path("/proc")) -> CgroupPlaces:
    """Return the files from which the usage of the group of `pid` can be read repeatedly.

    What is used must be that of the group whose limit it is held against: an ancestor's usage is
    more than that of one of its groups.
    """
    hierarchy = _Hierarchy(pid, proc)
    groups = hierarchy.folders("cpu")
    cpu, cpus = _tightest(groups, _cpu_limit)
    memory, memory_bytes = _tightest(hierarchy.folders("memory"), _memory_limit)
    accounting = hierarchy.folders("cpuacct")
    if cpu in accounting:  # v2, or v1 with both controllers in one hierarchy
        accounting = [cpu]
    elif cpu is not None:  # v1 with a hierarchy each, of the same shape
        accounting = accounting[groups.index(cpu) :]
    return CgroupPlaces(
        limits=CgroupLimits(cpus, memory_bytes),
        cpu_time=_first_file(accounting, "cpuacct.usage", "cpu.stat"),
        throttling=_first_file([cpu] if cpu else [], "cpu.stat"),
        memory=_first_file([memory] if memory else [], "memory.current", "memory.usage_in_bytes"),
    )


def memory_room_bytes(pid: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """Return the bytes that the groups of `pid` still allow; None without a limit.

    Page cache that the kernel can free counts as free.
    """
    rooms = [
        max(0, limit - _memory_used(folder) + _file_cache(folder / "memory.stat"))
        for folder in _Hierarchy(pid, proc).folders("memory")
        for limit in _memory_limit(folder)
    ]
    return min(rooms, default=None)


def cpu_quotas(pid: int | str = "self", proc: Path = Path("/proc")) -> dict[str, float]:
    """Return the CPU limit in cores of each control group of `pid`, by a name of the group.

    The name is made of the inode: a group has the same name in every container of a host, wherever
    it is mounted there. Groups without a limit are left out.
    """
    quotas = {}
    for folder in _Hierarchy(pid, proc).folders("cpu"):
        for cpus in _cpu_limit(folder):
            inode = folder.stat()
            quotas[f"{inode.st_dev}:{inode.st_ino}"] = cpus
    return quotas


class _Hierarchy:
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


def _tightest(
    folders: list[Path], limits_of: Callable[[Path], Iterable[N]]
) -> tuple[Path | None, N | None]:
    """Return the group with the lowest limit and the limit; without one, the own group and None."""
    limited = [(limit, folder) for folder in folders for limit in limits_of(folder)]
    if not limited:
        return (folders[0] if folders else None), None
    limit, folder = min(limited, key=lambda pair: pair[0])
    return folder, limit


def _first_file(folders: list[Path], *names: str) -> Path | None:
    """Return the first existing file with one of these names, folder by folder."""
    files = (folder / name for folder in folders for name in names)
    return next((file for file in files if file.is_file()), None)


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


def _cpu_limit(folder: Path) -> Iterator[float]:
    quota, _, period = readable_text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = readable_text(folder / "cpu.cfs_quota_us").strip()
        period = readable_text(folder / "cpu.cfs_period_us").strip()
    # "max" (v2) and -1 (v1) are no limit.
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        yield int(quota) / int(period)


def _memory_limit(folder: Path) -> Iterator[int]:
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
