"""One sample of a host and of the process trees that are watched. The only home of psutil.

Host figures come from psutil; those of processes from /proc (see procfs) through one walk a tick.
What is costly (PSS walks page tables, context switches want a file a thread) is read on every
`deep_every`-th sample, and less often still where that would cost more than 0.3 % of a core.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import psutil

from paceline.records.rows import HostSample
from paceline.telemetry.processes import ProcessTree, SwitchAccount
from paceline.telemetry.procfs import ProcFs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline.telemetry.processes import TreeReading
    from paceline.telemetry.procfs import ProcessSource

_DEEP_CPU_SHARE = 0.003


class CpuSeconds(NamedTuple):
    """CPU time since boot, summed over the cores; disjoint states."""

    user: float
    system: float
    idle: float
    iowait: float
    steal: float
    other: float  # nice, irq, softirq, guest


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """The host's counters and gauges at one moment."""

    cpu: CpuSeconds
    has_iowait: bool
    ram_used_bytes: int  # total - available: what cannot be had without swapping
    ram_total_bytes: int
    swap_used_bytes: int
    disk_read_bytes: int | None  # None where the system does not say (some containers)
    disk_write_bytes: int | None
    network_sent_bytes: int | None
    network_received_bytes: int | None


class SelfReading(NamedTuple):
    """What the sampling process itself has used."""

    cpu_seconds: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time comes from; replaced in tests."""

    unix_s: Callable[[], float] = time.time
    monotonic_s: Callable[[], float] = time.monotonic
    cpu_s: Callable[[], float] = time.process_time


def read_host() -> HostReading:
    """Read the host through psutil."""
    times = psutil.cpu_times()
    # Linux counts guest time in user and guest_nice in nice as well (psutil, _cpu_tot_time).
    guest = getattr(times, "guest", 0.0)
    kernel_rest = getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    # nowrap=False: the 32-bit counters that it guards against are gone, and it costs per device.
    # Both are None where the system lists no devices, whatever their type stubs say.
    disk = psutil.disk_io_counters(nowrap=False)
    network = psutil.net_io_counters(nowrap=False)
    return HostReading(
        cpu=CpuSeconds(
            user=times.user - guest,
            system=times.system,
            idle=times.idle,
            iowait=getattr(times, "iowait", 0.0),
            steal=getattr(times, "steal", 0.0),
            other=getattr(times, "nice", 0.0) + kernel_rest + guest,
        ),
        has_iowait=hasattr(times, "iowait"),
        ram_used_bytes=memory.total - memory.available,
        ram_total_bytes=memory.total,
        swap_used_bytes=swap.used,
        disk_read_bytes=getattr(disk, "read_bytes", None),
        disk_write_bytes=getattr(disk, "write_bytes", None),
        network_sent_bytes=getattr(network, "bytes_sent", None),
        network_received_bytes=getattr(network, "bytes_recv", None),
    )


def read_self(source: ProcessSource) -> SelfReading:
    """What this process has used since it started."""
    stat = source.stat(os.getpid())
    return SelfReading(time.process_time(), stat.rss_bytes if stat else 0)


class CpuShares:
    """Turns CPU counters into shares of the time between two readings.

    The kernel's iowait, and with it idle, may run backwards (proc(5)); such a step counts as zero.
    """

    def __init__(self) -> None:
        self._last: CpuSeconds | None = None
        self.total_seconds = CpuSeconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # never runs backwards

    def step(self, reading: CpuSeconds) -> tuple[CpuSeconds | None, bool]:
        """Percent of all cores' time by state (None on the first call), and whether the iowait
        counter ran forwards."""
        last, self._last = self._last, reading
        if last is None:
            self.total_seconds = reading
            return None, True
        deltas = [new - old for new, old in zip(reading, last, strict=True)]
        ran = CpuSeconds(*(max(0.0, delta) for delta in deltas))
        self.total_seconds = CpuSeconds(
            *(old + new for old, new in zip(self.total_seconds, ran, strict=True))
        )
        forwards = reading.iowait >= last.iowait
        elapsed = sum(ran)
        if elapsed <= 0:
            return None, forwards
        return CpuSeconds(*(100.0 * seconds / elapsed for seconds in ran)), forwards


class HostSampler:
    """Samples the host and the trees under `root_pids`; this very process is left out of them.

    `cpu_seconds` holds the host's CPU time by state since boot, as of the last sample.
    """

    def __init__(
        self,
        root_pids: Iterable[int],
        *,
        source: ProcessSource | None = None,
        host: Callable[[], HostReading] = read_host,
        itself: Callable[[ProcessSource], SelfReading] = read_self,
        clocks: Clocks | None = None,
        deep_every: int = 10,
    ) -> None:
        self._source = source or ProcFs()
        self._host = host
        self._itself = itself
        self._clocks = clocks or Clocks()
        self._deep_every = deep_every
        self._samples = 0
        self._next_deep_monotonic_s = float("-inf")
        self._shares = CpuShares()
        self._switches = SwitchAccount(self._source)
        self._tree = ProcessTree(self._source, root_pids, (os.getpid(),))
        self._last_tree: tuple[float, float] | None = None  # (monotonic s, CPU s)

    @property
    def cpu_seconds(self) -> CpuSeconds:
        return self._shares.total_seconds

    def any_alive(self) -> bool:
        """Whether a watched process still lives."""
        return self._tree.any_alive()

    def sample(self, *, final: bool = False) -> HostSample:
        """One row; `final` reads what is costly too, whatever the turn."""
        unix_s, monotonic_s = self._clocks.unix_s(), self._clocks.monotonic_s()
        host = self._host()
        shares, forwards = self._shares.step(host.cpu)
        tree = self._tree.walk()
        pss_bytes = self._read_deep(monotonic_s) if self._is_deep(monotonic_s, final) else None
        self._samples += 1
        itself = self._itself(self._source)
        return HostSample(
            unix_s=unix_s,
            cpu_user_percent=_rounded(shares and shares.user),
            cpu_system_percent=_rounded(shares and shares.system),
            cpu_idle_percent=_rounded(shares and shares.idle),
            cpu_iowait_percent=_rounded(shares.iowait if shares and host.has_iowait else None),
            cpu_steal_percent=_rounded(shares and shares.steal),
            cpu_other_percent=_rounded(shares and shares.other),
            iowait_valid=host.has_iowait and forwards,
            ram_used_bytes=host.ram_used_bytes,
            ram_total_bytes=host.ram_total_bytes,
            swap_used_bytes=host.swap_used_bytes,
            disk_read_bytes=host.disk_read_bytes,
            disk_write_bytes=host.disk_write_bytes,
            network_sent_bytes=host.network_sent_bytes,
            network_received_bytes=host.network_received_bytes,
            run_processes=tree.processes,
            run_cpu_seconds=tree.cpu_seconds,
            run_cpu_percent=_rounded(self._run_cpu_percent(monotonic_s, tree)),
            run_rss_bytes=tree.rss_bytes,
            run_pss_bytes=pss_bytes,
            run_threads=tree.threads,
            run_voluntary_context_switches=self._switches.voluntary,
            run_involuntary_context_switches=self._switches.involuntary,
            sidecar_cpu_seconds=itself.cpu_seconds,
            sidecar_rss_bytes=itself.rss_bytes,
        )

    def _run_cpu_percent(self, monotonic_s: float, tree: TreeReading) -> float | None:
        last, self._last_tree = self._last_tree, (monotonic_s, tree.cpu_seconds)
        if last is None or monotonic_s <= last[0]:
            return None
        return 100.0 * (tree.cpu_seconds - last[1]) / (monotonic_s - last[0])

    def _is_deep(self, monotonic_s: float, final: bool) -> bool:
        turn = self._samples % self._deep_every == 0
        return final or (turn and monotonic_s >= self._next_deep_monotonic_s)

    def _read_deep(self, monotonic_s: float) -> int | None:
        """Count context switches; return the PSS of the trees, None if a process hides its own."""
        started_s = self._clocks.cpu_s()
        pids = self._tree.live_pids
        self._switches.read(pids)
        try:
            pss = [self._source.pss_bytes(pid) for pid in pids]
        except PermissionError:
            return None
        finally:
            cost_s = self._clocks.cpu_s() - started_s
            self._next_deep_monotonic_s = monotonic_s + cost_s / _DEEP_CPU_SHARE
        told = [size for size in pss if size is not None]
        return sum(told) if told or not pids else None


def _rounded(value: float | None) -> float | None:
    """To a thousandth of a percent: the kernel's clock ticks carry no more."""
    return None if value is None else round(value, 3)
