"""What the control group around the watched processes may use, and uses.

Sources: kernel documentation, admin-guide/cgroup-v2 (cpu.stat, memory.current), cgroup-v1/cpuacct
(cpuacct.usage), scheduler/sched-bwc (cpu.stat of v1), cgroup-v1/memory (memory.usage_in_bytes).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.host.cgroups import find_places
from paceline.records.rows import CgroupSample
from paceline.telemetry.kernel_files import KernelFile, number_after
from paceline.telemetry.seldom import Seldom

if TYPE_CHECKING:
    from paceline.host.cgroups import CgroupPlaces
    from paceline.telemetry.seldom import Clocks

_PLACES_EVERY_S = 5.0
_PLACES_SHARE = 0.0001  # of a core; it takes a millisecond
_NANOSECONDS = 1e9
_MICROSECONDS = 1e6


class CgroupReader:
    """Reads the group of one process. Where it is and its limits are looked up anew every few
    seconds, as a process may be moved and limits changed."""

    def __init__(
        self,
        pid: int | str = "self",
        *,
        proc: Path = Path("/proc"),
        clocks: Clocks | None = None,
    ) -> None:
        self._places = Seldom(
            lambda: find_places(pid, proc), clocks, every_s=_PLACES_EVERY_S, cpu_share=_PLACES_SHARE
        )
        self._known: CgroupPlaces | None = None
        self._files: dict[Path, KernelFile] = {}

    def read(self, deep: bool = False) -> CgroupSample | None:
        """None where there is no control group, or no such process any more; `deep` looks up
        place and limits before their turn."""
        places = self._places.get(fresh=deep)
        if places is not self._known:
            self._follow(places)
        cpu_time, throttling = self._read(places.cpu_time), self._read(places.throttling)
        memory = self._read(places.memory)
        if not (cpu_time or throttling or memory):
            return None
        throttled_s, throttled_periods = _throttled(throttling)
        return CgroupSample(
            cpu_limit_cores=places.limits.cpus,
            cpu_s=_cpu_s(cpu_time),
            throttled_s=throttled_s,
            throttled_periods=throttled_periods,
            memory_limit_bytes=places.limits.memory_bytes,
            memory_used_bytes=number_after(memory, b""),
        )

    def _follow(self, places: CgroupPlaces) -> None:
        """Keep open what is read from now on, and nothing else."""
        self._known = places
        wanted = (places.cpu_time, places.throttling, places.memory)
        self._files = {
            path: self._files.get(path) or KernelFile(path) for path in wanted if path is not None
        }

    def _read(self, path: Path | None) -> bytes:
        return b"" if path is None else self._files[path].read()


def _cpu_s(content: bytes) -> float | None:
    microseconds = number_after(content, b"usage_usec ")
    if microseconds is not None:
        return microseconds / _MICROSECONDS
    nanoseconds = number_after(content, b"")  # cpuacct.usage is a bare number
    return None if nanoseconds is None else nanoseconds / _NANOSECONDS


def _throttled(content: bytes) -> tuple[float | None, int | None]:
    """Seconds and periods; the kernel leaves them out, or at 0, for a group without a limit."""
    periods = number_after(content, b"nr_throttled ")
    microseconds = number_after(content, b"throttled_usec ")
    if microseconds is not None:
        return microseconds / _MICROSECONDS, periods
    nanoseconds = number_after(content, b"throttled_time ")
    return (None if nanoseconds is None else nanoseconds / _NANOSECONDS), periods
