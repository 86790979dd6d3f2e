"""Everything that a sample says about the host, in one reading."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.telemetry.cgroup_usage import CgroupReader
from paceline.telemetry.cpu import CoreShares, CpuSeconds, CpuShares, parse_counters
from paceline.telemetry.devices import DiskReader, NetworkReader, without_container_links
from paceline.telemetry.gpus import GpuReader
from paceline.telemetry.kernel_files import KernelFile
from paceline.telemetry.memory import PagingReading, parse_memory, parse_paging
from paceline.telemetry.pressure import PressureReader
from paceline.telemetry.seldom import Clocks, Seldom
from paceline.telemetry.sensors import read_frequency_hertz, read_temperatures

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.records.rows import (
        CgroupSample,
        DiskCounters,
        GpuSample,
        NetworkCounters,
        Pressure,
    )
    from paceline.telemetry.cpu import CpuCounters
    from paceline.telemetry.memory import MemoryReading


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """The fields of HostSample that are about the host, under their names there."""

    cpu_user_percent: float | None
    cpu_system_percent: float | None
    cpu_idle_percent: float | None
    cpu_iowait_percent: float | None
    cpu_steal_percent: float | None
    cpu_other_percent: float | None
    iowait_valid: bool
    ram_used_bytes: int
    ram_total_bytes: int
    swap_used_bytes: int
    disk_read_bytes: int | None
    disk_write_bytes: int | None
    network_sent_bytes: int | None
    network_received_bytes: int | None
    cpu_seconds: dict[str, float]
    core_busy_s: list[float]
    core_busy_percent: list[float]
    cpu_frequency_hertz: float | None
    load: list[float]
    pressure: dict[str, Pressure]
    swap_total_bytes: int | None
    swapped_in_bytes: int | None
    swapped_out_bytes: int | None
    minor_page_faults: int | None
    major_page_faults: int | None
    disks: dict[str, DiskCounters]
    networks: dict[str, NetworkCounters]
    cgroup: CgroupSample | None
    temperatures_celsius: dict[str, float]
    gpus: list[GpuSample]

    def fields(self) -> dict[str, Any]:
        """Its fields by name, to make a HostSample with (dataclasses.asdict copies them, which
        takes longer than to read them)."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(field.name for field in fields(HostReading))


@dataclass(frozen=True, slots=True)
class _Cpu:
    percent: dict[str, float | None]
    iowait_valid: bool
    seconds: dict[str, float]
    core_busy_s: list[float]
    core_busy_percent: list[float]


class HostReader:
    """Reads this host, again and again; shares are of the time since the last reading.

    What changes slowly or is dear (temperatures, clock, page faults, GPUs) is read at most once a
    second and repeated in between, limits of control groups every five seconds. `cgroup_pid` is
    the process whose control group is told; None tells of none, where each watch has a CgroupReader
    of its own. The other parameters are for tests.
    """

    def __init__(
        self,
        cgroup_pid: int | str | None = "self",
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        clocks: Clocks | None = None,
        gpus: Callable[[], list[GpuSample]] | None = None,
        temperatures: Callable[[], dict[str, float]] = read_temperatures,
        frequency: Callable[[], float | None] = read_frequency_hertz,
    ) -> None:
        self._stat = KernelFile(proc / "stat")
        self._meminfo = KernelFile(proc / "meminfo")
        self._vmstat = KernelFile(proc / "vmstat")
        self._loadavg = KernelFile(proc / "loadavg")
        self._pressure = PressureReader(proc)
        self._disks = DiskReader(proc, sys)
        self._networks = NetworkReader(proc)
        self._cgroup = (
            None if cgroup_pid is None else CgroupReader(cgroup_pid, proc=proc, clocks=clocks)
        )
        self._shares = CpuShares()
        self._cores = CoreShares()
        self._paging = Seldom(self._read_paging, clocks)
        self._temperatures = Seldom(temperatures, clocks)
        self._frequency = Seldom(frequency, clocks)
        self._gpus = Seldom(gpus or GpuReader().read, clocks)

    def read(self, deep: bool = False) -> HostReading:
        """One reading; `deep` reads what changes slowly too, whatever its turn.

        Raises OSError where the kernel does not tell the CPU times or the memory.
        """
        cpu = self._step_cpu()
        memory = self._read_memory()
        paging = self._paging.get(fresh=deep)
        disks, networks = self._disks.read(), self._networks.read()
        return HostReading(
            cpu_user_percent=cpu.percent["user"],
            cpu_system_percent=cpu.percent["system"],
            cpu_idle_percent=cpu.percent["idle"],
            cpu_iowait_percent=cpu.percent["iowait"],
            cpu_steal_percent=cpu.percent["steal"],
            cpu_other_percent=cpu.percent["other"],
            iowait_valid=cpu.iowait_valid,
            ram_used_bytes=memory.ram_used_bytes,
            ram_total_bytes=memory.ram_total_bytes,
            swap_used_bytes=memory.swap_used_bytes,
            disk_read_bytes=_sum([disk.read_bytes for disk in disks.values()]),
            disk_write_bytes=_sum([disk.written_bytes for disk in disks.values()]),
            network_sent_bytes=_sum([network.sent_bytes for network in networks.values()]),
            network_received_bytes=_sum([network.received_bytes for network in networks.values()]),
            cpu_seconds=cpu.seconds,
            core_busy_s=cpu.core_busy_s,
            core_busy_percent=cpu.core_busy_percent,
            cpu_frequency_hertz=self._frequency.get(fresh=deep),
            load=[float(word) for word in self._loadavg.read().split()[:3]],
            pressure=self._pressure.read(),
            swap_total_bytes=memory.swap_total_bytes,
            swapped_in_bytes=paging.swapped_in_bytes,
            swapped_out_bytes=paging.swapped_out_bytes,
            minor_page_faults=paging.minor_page_faults,
            major_page_faults=paging.major_page_faults,
            disks=disks,
            networks=without_container_links(networks),
            cgroup=None if self._cgroup is None else self._cgroup.read(deep),
            temperatures_celsius=self._temperatures.get(fresh=deep),
            gpus=self._gpus.get(fresh=deep),
        )

    def _step_cpu(self) -> _Cpu:
        counters = self._read_counters()
        shares, forwards = self._shares.step(counters.cpu)
        seconds = self._shares.total_seconds
        percent = dict.fromkeys(CpuSeconds._fields) if shares is None else shares._asdict()
        if not counters.has_iowait:
            percent["iowait"] = None
        core_percent = self._cores.step(counters.cores)
        return _Cpu(
            percent={state: _rounded(share, 3) for state, share in percent.items()},
            iowait_valid=counters.has_iowait and forwards,
            seconds={state: round(total, 2) for state, total in seconds._asdict().items()},
            core_busy_s=[round(busy, 2) for busy in self._cores.busy_seconds],
            core_busy_percent=[round(share, 1) for share in core_percent],
        )

    def _read_counters(self) -> CpuCounters:
        counters = parse_counters(self._stat.read())
        if counters is None:
            raise OSError("/proc/stat: expected a line on the CPUs, found none")
        return counters

    def _read_memory(self) -> MemoryReading:
        content = self._meminfo.read()
        if not content:
            raise OSError("/proc/meminfo: expected to be readable, is not")
        return parse_memory(content)

    def _read_paging(self) -> PagingReading:
        return parse_paging(self._vmstat.read())


def _rounded(value: float | None, digits: int) -> float | None:
    """The kernel's clock ticks carry no more than a thousandth of a percent."""
    return None if value is None else round(value, digits)


def _sum(counts: list[int]) -> int | None:
    """None where nothing is listed, which is not the same as 0."""
    return sum(counts) if counts else None
