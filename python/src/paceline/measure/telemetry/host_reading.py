"""Values of this host, from psutil and the readers in `kernel` and `gpus`, by trace column."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Any

import psutil

from paceline.measure.records.metrics.metric import Row
from paceline.measure.telemetry.gpus import GpuReader
from paceline.measure.telemetry.kernel import CgroupReader, read_page_faults, read_pressure

# Devices that are stacked on other disks or lie in memory: their bytes would count twice.
_NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")
# Host ends of container links: their number has no bound, and a bridge counts their traffic too.
_CONTAINER_LINKS = ("veth", "cali", "lxc")


class HostReader:
    """Reads the host at each tick. It keeps only what successive readings share."""

    def __init__(
        self,
        cgroup_pid: int | str = "self",
        *,
        gpus: Callable[[], dict[str, dict[str, Any]]] | None = None,
        block_devices: Path = Path("/sys/block"),
    ) -> None:
        """cgroup_pid: a process in the control group to read. The other arguments are for tests."""
        self._proc = Path(psutil.PROCFS_PATH)
        self._cgroup = CgroupReader(cgroup_pid, self._proc)
        self._gpus = gpus or GpuReader().read
        self._block_devices = block_devices
        self._is_disk: dict[str, bool] = {}
        self._largest: dict[object, float] = {}

    def read(self, *, slow: bool) -> Row:
        """Return the values by column; those of the slow metrics only with `slow`."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        cores = self._core_busy_s()
        row: Row = {
            "cpu_seconds": self._cpu_seconds(),
            "core_busy_s": cores,
            "cpu_cores": len(cores),
            "load": dict(zip(("1m", "5m", "15m"), psutil.getloadavg(), strict=True)),
            "pressure": read_pressure(self._proc),
            "ram_used_bytes": memory.total - memory.available,
            "ram_total_bytes": memory.total,
            "swap_used_bytes": swap.used,
            "swap_total_bytes": swap.total,
            "swapped_in_bytes": swap.sin,
            "swapped_out_bytes": swap.sout,
            "disks": self._disks(),
            "networks": _networks(),
            "cgroup": self._cgroup.read(),
        }
        if slow:
            row |= {
                "cpu_frequency_hertz": _cpu_frequency_hertz(),
                **{f"{kind}_page_faults": n for kind, n in read_page_faults(self._proc).items()},
                "temperatures_celsius": _temperatures_celsius(),
                "gpus": self._gpus(),
            }
        return {column: value for column, value in row.items() if value not in ({}, None)}

    def _cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time since boot, summed over the cores, by disjoint modes."""
        times = psutil.cpu_times()
        modes = {
            "user": times.user - times.guest,  # `user` includes the time of guests
            "system": times.system,
            "idle": times.idle,
            "iowait": times.iowait,
            "steal": times.steal,
            "other": times.nice + times.irq + times.softirq + times.guest,
        }
        return {
            mode: self._never_decreasing(("cpu", mode), seconds) for mode, seconds in modes.items()
        }

    def _core_busy_s(self) -> dict[str, float]:
        """Return the busy time of each core since boot, by its position in /proc/stat."""
        busy = {}
        for number, core in enumerate(psutil.cpu_times(percpu=True)):
            busy[str(number)] = self._never_decreasing(
                ("core", number), core.user + core.nice + core.system + core.irq + core.softirq
            )
        return busy

    def _disks(self) -> dict[str, Row]:
        """Return counters of whole disks; none where the system lists none (some containers)."""
        counters = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        return {
            name: {
                "read_bytes": disk.read_bytes,
                "written_bytes": disk.write_bytes,
                "busy_s": disk.busy_time / 1000,
            }
            for name, disk in counters.items()
            if self._is_whole_disk(name)
        }

    def _never_decreasing(self, key: object, value: float) -> float:
        """Return the largest value so far of the counter `key`.

        Prometheus takes a decrease for a restart of the counter and adds the whole value again.
        """
        self._largest[key] = max(value, self._largest.get(key, value))
        return round(self._largest[key], 2)

    def _is_whole_disk(self, name: str) -> bool:
        """Return whether a block device is neither a partition nor a virtual device."""
        if name not in self._is_disk:
            # "!" stands for a slash in /sys (cciss/c0d0)
            folder = self._block_devices / name.replace("/", "!")
            self._is_disk[name] = not name.startswith(_NOT_DISKS) and folder.is_dir()
        return self._is_disk[name]


def _networks() -> dict[str, Row]:
    """Return counters of the interfaces in this network namespace."""
    counters = psutil.net_io_counters(pernic=True, nowrap=False)
    return {
        name: {
            "sent_bytes": nic.bytes_sent,
            "received_bytes": nic.bytes_recv,
            "dropped_packets": nic.dropin + nic.dropout,
        }
        for name, nic in counters.items()
        if not name.startswith(_CONTAINER_LINKS)
    }


def _temperatures_celsius() -> dict[str, float]:
    """Return temperatures by sensor, named `chip` or `chip/label`; empty without sensors.

    Where a chip has a sensor for its package, those of its cores are left out: a large host
    has hundreds.
    """
    found: dict[str, float] = {}
    for chip, sensors in psutil.sensors_temperatures().items():
        has_package = any(sensor.label.startswith("Package") for sensor in sensors)
        for sensor in sensors:
            if has_package and sensor.label.startswith("Core"):
                continue
            name = f"{chip}/{sensor.label}" if sensor.label else chip
            found[_unused(name, found)] = sensor.current
    return found


def _cpu_frequency_hertz() -> float | None:
    """Return the mean clock frequency of the cores; None where it cannot be read."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError, ValueError):  # drivers that cannot answer
        return None
    # psutil returns None (in spite of its type stubs) or 0 for an unknown frequency.
    megahertz: float | None = getattr(frequency, "current", None)
    return megahertz * _MEGAHERTZ if megahertz else None


def _unused(name: str, taken: dict[str, float]) -> str:
    """Return the name, with a number if it is taken."""
    names = chain([name], (f"{name} {number}" for number in count(2)))
    return next(each for each in names if each not in taken)
