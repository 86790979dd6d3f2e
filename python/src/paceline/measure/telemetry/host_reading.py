"""Values of this host, from psutil, the GPUs' library, and readers of the kernel's files.

The readers are for what psutil does not offer (pressure stall information, control groups, page
faults, context switches of threads), or reads too slowly for many processes (`read_process_io`).

Sources: kernel documentation, accounting/psi; admin-guide/cgroup-v2 (cpu.stat, memory.current);
cgroup-v1/cpuacct (cpuacct.usage) and memory (memory.usage_in_bytes); scheduler/sched-bwc (cpu.stat
of v1); proc_vmstat(5); proc_pid_stat(5); proc_pid_io(5); proc_pid_status(5).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import psutil

from paceline.base.host.cgroups import CgroupPlaces, find_places
from paceline.collectives.host import PROC, readable_text
from paceline.measure.records.metrics.metric import Row

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


# GPUs of a host, read through NVIDIA's management library (pynvml of nvidia-ml-py).

T = TypeVar("T")

_MEGAHERTZ = 1e6
_MILLIWATTS = 1000.0
# One of them exists wherever the driver does: on a host or in a container, and under WSL 2.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_log = logging.getLogger("paceline.sidecar")


class GpuReader:
    """Reads the GPUs that this process may see; none without a driver.

    The library is large, so it is loaded only if a driver exists. A GPU that disappears, or a
    driver that is unloaded, gives missing values, not an error.
    """

    def __init__(self, nvml: Any = None) -> None:
        """nvml: for tests; otherwise pynvml if this host has a driver."""
        self._nvml: Any = nvml or _load_nvml()
        self._gpus: list[tuple[Any, str]] = []  # NVML's handle and the name
        if self._nvml is not None:
            self._open()

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the values of each GPU, by NVML's index (that of nvidia-smi)."""
        return {
            str(index): {"name": name, **self._values(handle)}
            for index, (handle, name) in enumerate(self._gpus)
        }

    def _open(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            _log.info("GPUs are not sampled: NVML does not start: %s", error)
            return
        for index in range(self._ask(nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                name = self._ask(nvml.nvmlDeviceGetName, handle)
                self._gpus.append((handle, name or "unknown"))

    def _values(self, gpu: Any) -> dict[str, float | None]:
        nvml, ask = self._nvml, self._ask
        rates = ask(nvml.nvmlDeviceGetUtilizationRates, gpu)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, gpu)

        def scaled(factor: float, function: Callable[..., int], *arguments: Any) -> float | None:
            value = ask(function, gpu, *arguments)
            return None if value is None else value * factor

        return {
            "utilization_ratio": None if rates is None else rates.gpu / 100.0,
            "memory_used_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_watts": scaled(1 / _MILLIWATTS, nvml.nvmlDeviceGetPowerUsage),
            "sm_clock_hertz": scaled(_MEGAHERTZ, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "memory_clock_hertz": scaled(
                _MEGAHERTZ, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM
            ),
            "temperature_celsius": scaled(
                1.0, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU
            ),
        }

    def _ask(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Return None where the GPU has no such value, or where MIG hides it."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _load_nvml() -> Any:
    """Return the module pynvml, which has no types; None if it or the driver is missing."""
    if not any(file.exists() for file in _DRIVER_FILES):
        return None
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        _log.info("GPUs are not sampled: the package nvidia-ml-py is not installed")
        return None
    return pynvml


# --- values of this host by trace column, from psutil and the readers above ----------------------

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
        cpu_time: Path | None = None,
        gpus: Callable[[], dict[str, dict[str, Any]]] | None = None,
        block_devices: Path = Path("/sys/block"),
    ) -> None:
        """cgroup_pid: a process in the control group to read. cpu_time: file with the CPU time of a
        host that takes turns with others. The other arguments are for tests."""
        self._cpu_time = cpu_time
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
        if self._cpu_time is not None:
            row |= self._of_turns(self._cpu_time)
        return {column: value for column, value in row.items() if value not in ({}, None)}

    def _of_turns(self, cpu_time: Path) -> Row:
        """Return what replaces the machine's use of CPU where several hosts are on its cores."""
        used_s = _cpu_s(readable_text(cpu_time))
        return {
            "cpu_seconds": None if used_s is None else {"user": used_s},
            "cpu_cores": len(os.sched_getaffinity(0)),
            **dict.fromkeys(("core_busy_s", "load", "pressure")),
        }

    def _cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time since boot, summed over the cores, by disjoint modes."""
        times = psutil.cpu_times()
        modes = {
            "user": times.user - times.guest,  # `user` includes the time of guests
            "system": times.system,
            "idle": times.idle,
            "iowait": times.iowait,
            "steal": times.steal,
            "nice": times.nice,
            "other": times.irq + times.softirq + times.guest,
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


# --- CPU times of all processes of this host, to tell ours from others ----------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTime:
    """CPU time of a process since its start."""

    name: str
    cpu_s: float  # of ours with that of the processes for which it has waited
    is_ours: bool


Processes = Mapping[tuple[int, float], ProcessTime]  # by pid and start


def read_processes(owner: int) -> Processes:
    """Return the processes that can be seen; ours are this one and its tree, or that of `owner`, if
    it has started us."""
    found, parents = {}, {}
    fields = ["pid", "ppid", "name", "cpu_times", "create_time"]
    for process in psutil.process_iter(fields):
        facts = process.info
        parents[facts["pid"]] = facts["ppid"]
        if facts["cpu_times"] is not None:
            found[facts["pid"]] = facts
    own = os.getpid()
    root = owner if _is_below(own, owner, parents) else own
    return {
        (pid, facts["create_time"]): ProcessTime(
            name=facts["name"], cpu_s=_cpu_s_of(facts["cpu_times"], ours), is_ours=ours
        )
        for pid, facts in found.items()
        for ours in [_is_below(pid, root, parents)]
    }


def _cpu_s_of(times: Any, is_ours: bool) -> float:
    waited: float = times.children_user + times.children_system if is_ours else 0.0
    return float(times.user + times.system + waited)


def _is_below(pid: int | None, root: int, parents: Mapping[int, int | None]) -> bool:
    """Return whether a process is `root` or descends from it."""
    for _ in range(len(parents) + 1):  # a pid that was given again could close a circle
        if pid is None or pid == root:
            break
        pid = parents.get(pid)
    return pid == root
