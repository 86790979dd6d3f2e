"""CPU and memory limits of a process's control group, v1 and v2, read from the files themselves
(psutil and os.cpu_count report the host's, giampaolo/psutil#2100).

Sources: kernel documentation, admin-guide/cgroup-v2 (cpu.max, memory.max), cgroup-v1/memory
(memory.limit_in_bytes), scheduler/sched-bwc (cpu.cfs_quota_us, cpu.cfs_period_us); cgroups(7) and
proc_pid_mountinfo(5) for where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# v1 says "no limit" with the largest page-aligned 64-bit number; nothing real comes near 2**60.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limits from the process's group up to the root; None is no limit."""

    cpus: float | None  # cores
    memory_bytes: int | None


class _Mount(NamedTuple):
    version: int
    controllers: frozenset[str]  # v1 only
    root: PurePosixPath  # the part of the hierarchy that is mounted
    point: Path


def read_limits(pid: int | str = "self", proc: Path = Path("/proc")) -> CgroupLimits:
    """The limits that hold for `pid`; all None where there are no cgroups or they do not say."""
    mounts = list(_mounts(proc / str(pid) / "mountinfo"))
    groups = list(_groups(proc / str(pid) / "cgroup"))
    cpus: list[float] = []
    memory_bytes: list[int] = []
    for folder in _folders(mounts, groups, "cpu"):
        cpus += _cpu_limit(folder)
    for folder in _folders(mounts, groups, "memory"):
        memory_bytes += _memory_limit(folder)
    return CgroupLimits(min(cpus, default=None), min(memory_bytes, default=None))


def cpu_quotas(pid: int | str = "self", proc: Path = Path("/proc")) -> dict[str, float]:
    """Cores that each control group around `pid` allows, by a name of the group.

    The names are those of inodes: the same group is called the same from every container of a host,
    in which it may well be mounted elsewhere. Groups without a limit are left out.
    """
    mounts = list(_mounts(proc / str(pid) / "mountinfo"))
    groups = list(_groups(proc / str(pid) / "cgroup"))
    quotas = {}
    for folder in _folders(mounts, groups, "cpu"):
        for cpus in _cpu_limit(folder):
            inode = folder.stat()
            quotas[f"{inode.st_dev}:{inode.st_ino}"] = cpus
    return quotas


def _mounts(mountinfo: Path) -> Iterator[_Mount]:
    for line in _text(mountinfo).splitlines():
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
    """(controllers, path) a line; no controllers for v2."""
    for line in _text(cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        yield frozenset(filter(None, controllers.split(","))), PurePosixPath(path)


def _folders(
    mounts: list[_Mount],
    groups: list[tuple[frozenset[str], PurePosixPath]],
    controller: str,
) -> Iterator[Path]:
    """Folders whose limits for `controller` hold, from the process's own group upwards."""
    for controllers, path in groups:
        for mount in mounts:
            is_v1_match = mount.version == 1 and controller in controllers & mount.controllers
            is_v2_match = mount.version == 2 and not controllers
            if not (is_v1_match or is_v2_match):
                continue
            # In a container the path may name the host's hierarchy, of which only our own part is
            # mounted: then the mount's root is our group.
            inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else None
            own = (
                mount.point / inside if inside and (mount.point / inside).is_dir() else mount.point
            )
            yield own
            for folder in own.parents:
                if not folder.is_relative_to(mount.point):
                    break
                yield folder


def _cpu_limit(folder: Path) -> Iterator[float]:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us").strip()
        period = _text(folder / "cpu.cfs_period_us").strip()
    # "max" (v2) and -1 (v1) are no limit.
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        yield int(quota) / int(period)


def _memory_limit(folder: Path) -> Iterator[int]:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _text(folder / name).strip()
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            yield int(text)


def _text(path: Path) -> str:
    """The file's text, empty where there is none or it may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
