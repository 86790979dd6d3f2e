"""One reading of this host, from psutil and the readers in `kernel` and `gpus`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from paceline.telemetry.gpus import GpuReader
from paceline.telemetry.kernel import (
    CgroupReader,
    CgroupUsage,
    PressureTimes,
    read_page_faults,
    read_pressure,
)

_MEGAHERTZ = 1e6
# Devices that are stacked on other disks or lie in memory: their bytes would count twice.
_NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")
# Host ends of container links: their number has no bound, and a bridge counts their traffic too.
_CONTAINER_LINKS = ("veth", "cali", "lxc")


class HostReader:
    """Makes a reading for each tick. It keeps only what successive readings share."""

    def __init__(
        self,
        cgroup_pid: int | str = "self",
        *,
        gpus: Callable[[], dict[str, dict[str, Any]]] | None = None,
        block_devices: Path = Path("/sys/block"),
    ) -> None:
        """cgroup_pid: a process in the control group to read. The other arguments are for tests."""
        self.proc = Path(psutil.PROCFS_PATH)
        self.cgroup = CgroupReader(cgroup_pid, self.proc)
        self.gpus = gpus or GpuReader().read
        self._block_devices = block_devices
        self._is_disk: dict[str, bool] = {}
        self._largest: dict[object, float] = {}

    def read(self) -> HostReading:
        """Start a new reading."""
        return HostReading(self)

    def never_decreasing(self, key: object, value: float) -> float:
        """Return the largest value so far of the counter `key`.

        Prometheus takes a decrease for a restart of the counter and adds the whole value again.
        """
        self._largest[key] = max(value, self._largest.get(key, value))
        return round(self._largest[key], 2)

    def is_disk(self, name: str) -> bool:
        """Return whether a block device is a whole disk, not a partition or a virtual device."""
        if name not in self._is_disk:
            # "!" stands for a slash in /sys (cciss/c0d0)
            folder = self._block_devices / name.replace("/", "!")
            self._is_disk[name] = not name.startswith(_NOT_DISKS) and folder.is_dir()
        return self._is_disk[name]


class HostReading:
    """Figures of the host at one tick. Each source is read once, when a metric first asks."""

    def __init__(self, reader: HostReader) -> None:
        self._reader = reader

    @cached_property
    def cpu_seconds(self) -> dict[str, float]:
        """CPU time since boot, summed over the cores, by disjoint modes."""
        times = _CpuTimes.of(psutil.cpu_times())
        modes = {
            "user": times.user - times.guest,  # `user` includes the time of guests
            "system": times.system,
            "idle": times.idle,
            "iowait": times.iowait,
            "steal": times.steal,
            "other": times.nice + times.irq + times.softirq + times.guest,
        }
        keep = self._reader.never_decreasing
        return {mode: keep(("cpu", mode), seconds) for mode, seconds in modes.items()}

    @cached_property
    def core_busy_seconds(self) -> dict[str, float]:
        """Busy time of each core since boot, by its position in /proc/stat."""
        keep = self._reader.never_decreasing
        busy = {}
        for number, times in enumerate(psutil.cpu_times(percpu=True)):
            core = _CpuTimes.of(times)
            busy[str(number)] = keep(
                ("core", number), core.user + core.nice + core.system + core.irq + core.softirq
            )
        return busy

    @cached_property
    def memory(self) -> Any:
        return psutil.virtual_memory()

    @cached_property
    def swap(self) -> Any:
        return psutil.swap_memory()

    @cached_property
    def load(self) -> dict[str, float]:
        return dict(zip(("1m", "5m", "15m"), psutil.getloadavg(), strict=True))

    @cached_property
    def pressure(self) -> dict[str, PressureTimes]:
        return read_pressure(self._reader.proc)

    @cached_property
    def page_faults(self) -> dict[str, int]:
        return read_page_faults(self._reader.proc)

    @cached_property
    def disks(self) -> dict[str, Any]:
        """Counters of whole disks; empty where the system lists none (some containers)."""
        counters = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        return {name: disk for name, disk in counters.items() if self._reader.is_disk(name)}

    @cached_property
    def networks(self) -> dict[str, Any]:
        """Counters of the interfaces in this network namespace."""
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        return {n: nic for n, nic in counters.items() if not n.startswith(_CONTAINER_LINKS)}

    @cached_property
    def cgroup(self) -> CgroupUsage | None:
        return self._reader.cgroup.read()

    @cached_property
    def gpus(self) -> dict[str, dict[str, Any]]:
        return self._reader.gpus()

    @cached_property
    def temperatures(self) -> dict[str, float]:
        """Degrees Celsius by sensor, named `chip` or `chip/label`; empty without sensors.

        Where a chip has a sensor for its package, those of its cores are left out: a large host
        has hundreds.
        """
        read = getattr(psutil, "sensors_temperatures", dict)  # missing on some platforms
        found: dict[str, float] = {}
        for chip, sensors in read().items():
            has_package = any(sensor.label.startswith("Package") for sensor in sensors)
            for sensor in sensors:
                if has_package and sensor.label.startswith("Core"):
                    continue
                name = f"{chip}/{sensor.label}" if sensor.label else chip
                found[_unused(name, found)] = sensor.current
        return found

    @cached_property
    def cpu_frequency_hertz(self) -> float | None:
        """Mean clock frequency of the cores; None where it cannot be read."""
        try:
            frequency = psutil.cpu_freq()
        except (OSError, NotImplementedError, ValueError):  # drivers that cannot answer
            return None
        # psutil returns None (in spite of its type stubs) or 0 for an unknown frequency.
        megahertz: float | None = getattr(frequency, "current", None)
        return megahertz * _MEGAHERTZ if megahertz else None


class _CpuTimes(NamedTuple):
    """Seconds by mode; 0 for modes that the kernel does not report."""

    user: float
    nice: float
    system: float
    idle: float
    iowait: float
    irq: float
    softirq: float
    steal: float
    guest: float

    @classmethod
    def of(cls, times: Any) -> _CpuTimes:
        return cls(*(getattr(times, mode, 0.0) for mode in cls._fields))


def _unused(name: str, taken: dict[str, float]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name} {number}" in taken:
        number += 1
    return f"{name} {number}"
