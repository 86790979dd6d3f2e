"""Figures of a trial's hosts while it trained: the evidence for causes, from the sidecars' traces.

A figure is None where no host measured it. Rates and counts are sums over the hosts. Time that is
lost is that of the host that loses most, because the others wait for it; other percentages are
means. Pressure (PSI) counts tasks of the whole machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.analysis.trial.reading import TrialRecord, read_hosts
from paceline.analysis.trial.usage import TrainingSamples, disturbance

Values = dict[str, float | None]

Unit = Literal["%", "1/s", "bytes/s", "cores", "GHz", "s", ""]


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of `host_frame`, as evidence. factor: from the unit of the column."""

    name: str
    label: str
    unit: Unit
    column: str
    factor: float = 1.0

    @property
    def is_sum(self) -> bool:
        return self.unit in ("1/s", "bytes/s", "cores", "")


FIGURES = (
    Figure("cpu_idle", "CPU idle", "%", "cpu_idle_percent"),
    Figure("iowait", "IOWait", "%", "cpu_iowait_percent"),
    Figure("steal", "CPU time stolen by the hypervisor", "%", "cpu_steal_percent"),
    Figure("throttled", "time stopped by the CPU quota", "%", "cgroup_throttled_percent"),
    Figure("run_cores", "CPU time of the run", "cores", "run_cpu_percent", 0.01),
    Figure("threads", "threads of the run", "", "run_threads"),
    Figure(
        "voluntary_switches",
        "voluntary context switches",
        "1/s",
        "run_voluntary_context_switches_per_s",
    ),
    Figure(
        "involuntary_switches",
        "involuntary context switches",
        "1/s",
        "run_involuntary_context_switches_per_s",
    ),
    Figure("load", "run queue (load average, 1 minute)", "", "load_1m"),
    Figure("cpu_pressure", "time in which a task waited for a core", "%", "pressure_cpu_percent"),
    Figure("io_pressure", "time in which a task waited for I/O", "%", "pressure_io_percent"),
    Figure(
        "memory_pressure", "time in which a task waited for memory", "%", "pressure_memory_percent"
    ),
    Figure("minor_faults", "minor page faults", "1/s", "minor_page_faults_per_s"),
    Figure("major_faults", "major page faults", "1/s", "major_page_faults_per_s"),
    Figure("disk_read", "read from disks", "bytes/s", "disk_read_bytes_per_s"),
    Figure("run_read", "read from storage by the run", "bytes/s", "run_read_bytes_per_s"),
    Figure("network_sent", "sent over the network", "bytes/s", "network_sent_bytes_per_s"),
    Figure("frequency", "clock frequency", "GHz", "cpu_frequency_hertz", 1e-9),
)
OTHERS = Figure("others", "other processes and interrupts, of all cores", "%", "")
ALL_FIGURES = (*FIGURES, OTHERS)
FIGURES_BY_NAME = {figure.name: figure for figure in ALL_FIGURES}
HOST_CORES = "host_cores"  # cores of a host, to which percentages refer
HARDWARE_COUNTERS = "not available: the sidecar records no hardware counters (perf_event_open)"
_LEAST = 1e-4  # of its unit; less is a rounding of the computation, as 1.8e-12 % of idle time


def amount(value: float | None, unit: str) -> str:
    """Format a figure with its unit, with three significant digits and without an exponent."""
    if value is None:
        return "not measured"
    if unit == "bytes/s":
        return f"{_digits(value / 1e6)} MB/s"
    if unit == "s":
        return f"{_digits(value)} s" if value >= 1 else f"{_digits(1000 * value)} ms"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    if abs(value) < _LEAST:
        return "0"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def trial_evidence(record: TrialRecord) -> Values:
    """Return the figures of one trial by name. Raises DataError if a trace is damaged."""
    hosts = read_hosts(record.files)
    sampled = [TrainingSamples(record, host) for host in hosts if not host.samples.is_empty()]
    by_host = [{each.name: host.mean(each.column) for each in FIGURES} for host in sampled]
    values = {figure.name: _combined(figure, by_host) for figure in FIGURES}
    load = disturbance(record, hosts)
    cores = [host.header["cores"] for host in hosts if host.header.get("cores")]
    return {
        **values,
        OTHERS.name: None if load is None else load.busy_percent,
        HOST_CORES: max(cores, default=None),
    }


def _combined(figure: Figure, by_host: Sequence[Mapping[str, float | None]]) -> float | None:
    known = [value for host in by_host if (value := host[figure.name]) is not None]
    if not known:
        return None
    if figure.is_sum:
        return figure.factor * sum(known)
    is_lost = figure.unit == "%" and figure.name != "cpu_idle"
    return figure.factor * (max(known) if is_lost else sum(known) / len(known))
