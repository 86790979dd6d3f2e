"""CPU and memory limits of a process's control group, v1 and v2, and the files with its usage.

psutil and os.cpu_count report the figures of the host instead (giampaolo/psutil#2100).

Sources: kernel documentation, admin-guide/cgroup-v2 (cpu.max, memory.max), cgroup-v1/memory
(memory.limit_in_bytes), scheduler/sched-bwc (cpu.cfs_quota_us, cpu.cfs_period_us); cgroups(7) and
proc_pid_mountinfo(5) for the places of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.collectives.host import ControlGroups, memory_limit, readable_text

N = TypeVar("N", int, float)


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


def read_limits(pid: int | str = "self", proc: Path = Path("/proc")) -> CgroupLimits:
    """Return the limits of `pid`; all None without control groups or limits."""
    return find_places(pid, proc).limits


def find_places(pid: int | str = "self", proc: Path = Path("/proc")) -> CgroupPlaces:
    """Return the files from which the usage of the group of `pid` can be read repeatedly.

    What is used must be that of the group whose limit it is held against: an ancestor's usage is
    more than that of one of its groups.
    """
    hierarchy = ControlGroups(pid, proc)
    groups = hierarchy.folders("cpu")
    cpu, cpus = _tightest(groups, _cpu_limit)
    memory, memory_bytes = _tightest(hierarchy.folders("memory"), memory_limit)
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


def cpu_quotas(pid: int | str = "self", proc: Path = Path("/proc")) -> dict[str, float]:
    """Return the CPU limit in cores of each control group of `pid`, by a name of the group.

    The name is made of the inode: a group has the same name in every container of a host, wherever
    it is mounted there. Groups without a limit are left out.
    """
    quotas = {}
    for folder in ControlGroups(pid, proc).folders("cpu"):
        for cpus in _cpu_limit(folder):
            inode = folder.stat()
            quotas[f"{inode.st_dev}:{inode.st_ino}"] = cpus
    return quotas


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


def _cpu_limit(folder: Path) -> Iterator[float]:
    quota, _, period = readable_text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = readable_text(folder / "cpu.cfs_quota_us").strip()
        period = readable_text(folder / "cpu.cfs_period_us").strip()
    # "max" (v2) and -1 (v1) are no limit.
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        yield int(quota) / int(period)
