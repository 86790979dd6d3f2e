"""Readers for what psutil does not offer (pressure stall information, control groups, page faults,
context switches of threads), or reads too slowly for many processes (`read_process_io`).

Sources: kernel documentation, accounting/psi; admin-guide/cgroup-v2 (cpu.stat, memory.current);
cgroup-v1/cpuacct (cpuacct.usage) and memory (memory.usage_in_bytes); scheduler/sched-bwc (cpu.stat
of v1); proc_vmstat(5); proc_pid_stat(5); proc_pid_io(5); proc_pid_status(5).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.base.host.cgroups import CgroupPlaces, find_places
from paceline.collectives.free_memory import readable_text
from paceline.collectives.host import PROC

_RESOURCES = ("cpu", "memory", "io")
_PLACES_EVERY_S = 5.0  # a process can be moved to another group, and limits can change
_NANOSECONDS = 1e9
_MICROSECONDS = 1e6


def read_process_io(pid: int, proc: Path = PROC) -> tuple[int, int] | None:
    """Return bytes read from and written to disks, of a process and of the children that it has
    waited for; None if they may not be read, or if the kernel does not count them. Raises
    ProcessLookupError if the process ends meanwhile."""
    try:
        with open(f"{proc}/{pid}/io", "rb") as file:  # noqa: PTH123
            lines = dict(line.split(b": ") for line in file.read().splitlines())
    except (PermissionError, FileNotFoundError):
        return None
    return int(lines[b"read_bytes"]), int(lines[b"write_bytes"])


def read_pressure(proc: Path = PROC) -> dict[str, dict[str, float]]:
    """Return the pressure stall information by resource; empty without support in the kernel.

    some_s, full_s: seconds since boot in which some or all tasks waited.
    """
    found = {}
    for resource in _RESOURCES:
        lines = readable_text(proc / "pressure" / resource).splitlines()
        totals = {f"{line.split()[0]}_s": _total_s(line) for line in lines if "total=" in line}
        if totals:
            found[resource] = totals
    return found


def read_page_faults(proc: Path = PROC) -> dict[str, int]:
    """Return the page faults since boot by kind; empty where the kernel does not count them."""
    counters = _keyed(readable_text(proc / "vmstat"))
    if "pgfault" not in counters or "pgmajfault" not in counters:
        return {}
    major = counters["pgmajfault"]
    return {"minor": counters["pgfault"] - major, "major": major}


def read_thread_switches(pid: int, proc: Path = PROC) -> dict[int, tuple[int, int]]:
    """Return (voluntary, involuntary) context switches by thread id; psutil has only those of a
    process's main thread. Threads that end meanwhile are left out."""
    found = {}
    for status in (proc / str(pid) / "task").glob("*/status"):
        _, marker, rest = readable_text(status).rpartition("\nvoluntary_ctxt_switches:")
        numbers = [int(word) for word in rest.split() if word.isdigit()]
        if marker and len(numbers) >= 2:
            found[int(status.parent.name)] = numbers[0], numbers[1]
    return found


class CgroupReader:
    """Reads the control group of one process."""

    def __init__(
        self,
        pid: int | str = "self",
        proc: Path = PROC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid, self._proc, self._clock = pid, proc, clock
        self._places: CgroupPlaces | None = None
        self._places_until_s = float("-inf")

    def read(self) -> dict[str, float]:
        """Return usage and limits; empty if there is no control group or the process has ended."""
        now_s = self._clock()
        if self._places is None or now_s >= self._places_until_s:
            self._places = find_places(self._pid, self._proc)
            self._places_until_s = now_s + _PLACES_EVERY_S
        places = self._places
        cpu_time, throttling = readable_text(places.cpu_time), readable_text(places.throttling)
        memory = readable_text(places.memory).strip()
        if not (cpu_time or throttling or memory):
            return {}
        throttled = _keyed(throttling)
        found = {
            "cpu_limit_cores": places.limits.cpus,
            "cpu_s": _cpu_s(cpu_time),
            "throttled_s": _throttled_s(throttled),
            "throttled_periods": throttled.get("nr_throttled"),
            "memory_limit_bytes": places.limits.memory_bytes,
            "memory_used_bytes": int(memory) if memory.isdigit() else None,
        }
        return {name: value for name, value in found.items() if value is not None}


def _cpu_s(text: str) -> float | None:
    if text.strip().isdigit():  # cpuacct.usage of v1
        return int(text) / _NANOSECONDS
    microseconds = _keyed(text).get("usage_usec")
    return None if microseconds is None else microseconds / _MICROSECONDS


def _throttled_s(counters: dict[str, int]) -> float | None:
    """Return the throttled time in seconds; None for a group without a limit."""
    if "throttled_usec" in counters:
        return counters["throttled_usec"] / _MICROSECONDS
    nanoseconds = counters.get("throttled_time")
    return None if nanoseconds is None else nanoseconds / _NANOSECONDS


def _total_s(line: str) -> float:
    return int(line.rpartition("total=")[2]) / _MICROSECONDS


def _keyed(text: str) -> dict[str, int]:
    """Parse lines "name number"."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
