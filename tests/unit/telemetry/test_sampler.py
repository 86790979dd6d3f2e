"""Samples from invented readings with exact numbers, and of real processes against wait4's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import psutil
import pytest

from paceline.telemetry.procfs import ContextSwitches
from paceline.telemetry.sampler import (
    Clocks,
    CpuSeconds,
    HostReading,
    HostSampler,
    SelfReading,
    read_host,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.unit.telemetry.conftest import FakeProcesses

READING = HostReading(
    cpu=CpuSeconds(user=100.0, system=50.0, idle=800.0, iowait=40.0, steal=6.0, other=4.0),
    has_iowait=True,
    ram_used_bytes=3,
    ram_total_bytes=16,
    swap_used_bytes=5,
    disk_read_bytes=7,
    disk_write_bytes=8,
    network_sent_bytes=9,
    network_received_bytes=10,
)


def later(**seconds: float) -> HostReading:
    """READING with CPU states that have gone on by so many seconds."""
    old = READING.cpu._asdict()
    return replace(READING, cpu=CpuSeconds(**{k: v + seconds.get(k, 0.0) for k, v in old.items()}))


def sampler(
    processes: FakeProcesses,
    readings: Iterable[HostReading] = (),
    *,
    interval_s: float = 1.0,
    cpu_s: Iterable[float] | None = None,
    deep_every: int = 10,
) -> HostSampler:
    feed, ticks = iter(readings), count()
    cpu = iter(cpu_s) if cpu_s is not None else None
    return HostSampler(
        [10],
        source=processes,
        host=lambda: next(feed, READING),
        itself=lambda _: SelfReading(0.25, 12345),
        clocks=Clocks(
            unix_s=lambda: 1000.0,
            monotonic_s=lambda: next(ticks) * interval_s,
            cpu_s=lambda: next(cpu) if cpu is not None else 0.0,
        ),
        deep_every=deep_every,
    )


@pytest.fixture(autouse=True)
def root(processes: FakeProcesses) -> None:
    processes.add(10, 1, threads=3, rss_bytes=4096)
    processes.pss[10] = 100


def test_first_sample_has_no_shares(processes: FakeProcesses) -> None:
    row = sampler(processes).sample()
    assert row.cpu_user_percent is None
    assert row.cpu_idle_percent is None
    assert row.cpu_iowait_percent is None
    assert row.run_cpu_percent is None
    assert row.iowait_valid


def test_shares_are_percent_of_all_cores_since_the_last_sample(processes: FakeProcesses) -> None:
    # 2 cores for one second: 2 s of CPU time
    step = later(user=1.0, system=0.3, idle=0.4, iowait=0.2, steal=0.06, other=0.04)
    sampling = sampler(processes, [READING, step])
    sampling.sample()
    row = sampling.sample()
    assert row.cpu_user_percent == 50.0
    assert row.cpu_system_percent == 15.0
    assert row.cpu_idle_percent == 20.0
    assert row.cpu_iowait_percent == 10.0
    assert row.cpu_steal_percent == 3.0
    assert row.cpu_other_percent == 2.0
    assert row.iowait_valid
    assert sampling.cpu_seconds == pytest.approx((101.0, 50.3, 800.4, 40.2, 6.06, 4.04))


def test_iowait_that_runs_backwards_counts_as_zero_and_is_marked(
    processes: FakeProcesses,
) -> None:
    readings = [
        READING,
        later(user=1.0, idle=1.0, iowait=-3.0),
        later(user=1.5, idle=2.4, iowait=-2.9),
    ]
    sampling = sampler(processes, readings)
    sampling.sample()
    row = sampling.sample()
    assert row.iowait_valid is False
    assert row.cpu_iowait_percent == 0.0
    assert (row.cpu_user_percent, row.cpu_idle_percent) == (50.0, 50.0)
    assert sampling.cpu_seconds.iowait == 40.0
    row = sampling.sample()  # 0.5 + 1.4 + 0.1 s
    assert row.iowait_valid is True
    assert row.cpu_iowait_percent == 5.0
    assert sampling.cpu_seconds.iowait == pytest.approx(40.1)


def test_system_without_iowait_says_so(processes: FakeProcesses) -> None:
    without = replace(READING, has_iowait=False)
    sampling = sampler(processes, [without, replace(later(user=1.0), has_iowait=False)])
    sampling.sample()
    row = sampling.sample()
    assert row.iowait_valid is False
    assert row.cpu_iowait_percent is None
    assert row.cpu_user_percent == 100.0


def test_counters_that_stand_still_give_no_shares(processes: FakeProcesses) -> None:
    sampling = sampler(processes)
    sampling.sample()
    assert sampling.sample().cpu_user_percent is None


def test_gauges_and_counters_are_handed_on(processes: FakeProcesses) -> None:
    row = sampler(processes).sample()
    assert row.unix_s == 1000.0
    assert (row.ram_used_bytes, row.ram_total_bytes, row.swap_used_bytes) == (3, 16, 5)
    assert (row.disk_read_bytes, row.disk_write_bytes) == (7, 8)
    assert (row.network_sent_bytes, row.network_received_bytes) == (9, 10)
    assert (row.run_processes, row.run_threads, row.run_rss_bytes) == (1, 3, 4096)
    assert (row.sidecar_cpu_seconds, row.sidecar_rss_bytes) == (0.25, 12345)


def test_run_cpu_is_percent_of_one_core(processes: FakeProcesses) -> None:
    sampling = sampler(processes, interval_s=2.0)
    sampling.sample()
    processes.change(10, own_ticks=300)
    row = sampling.sample()
    assert row.run_cpu_seconds == 3.0
    assert row.run_cpu_percent == 150.0


def test_what_is_costly_is_read_on_every_nth_sample_and_the_final_one(
    processes: FakeProcesses,
) -> None:
    sampling = sampler(processes, deep_every=3)
    rows = [sampling.sample() for _ in range(5)] + [sampling.sample(final=True)]
    assert [row.run_pss_bytes for row in rows] == [100, None, None, 100, None, 100]


def test_what_is_costly_is_read_less_often_the_more_it_costs(processes: FakeProcesses) -> None:
    # Each reading takes 0.012 s of CPU: at 0.3 % of a core no sooner than 4 s after the last.
    sampling = sampler(processes, deep_every=1, cpu_s=(0.012 * (n // 2 + n % 2) for n in count()))
    rows = [sampling.sample() for _ in range(9)]
    assert [i for i, row in enumerate(rows) if row.run_pss_bytes is not None] == [0, 4, 8]


def test_switches_count_from_the_first_sample(processes: FakeProcesses) -> None:
    processes.switches[10] = {10: ContextSwitches(1000, 500)}
    sampling = sampler(processes)
    assert sampling.sample().run_voluntary_context_switches == 0
    processes.switches[10] = {10: ContextSwitches(1030, 504)}
    row = sampling.sample(final=True)
    assert row.run_voluntary_context_switches == 30
    assert row.run_involuntary_context_switches == 4


def test_pss_that_may_not_be_read_is_missing_not_partial(processes: FakeProcesses) -> None:
    processes.add(11, 10)
    processes.pss[11] = 50
    sampling = sampler(processes, deep_every=1)
    assert sampling.sample().run_pss_bytes == 150
    processes.denied.add(11)
    row = sampling.sample()
    assert row.run_pss_bytes is None
    assert row.run_processes == 2


def test_pss_that_the_kernel_does_not_tell_is_missing(processes: FakeProcesses) -> None:
    processes.pss.clear()
    assert sampler(processes).sample().run_pss_bytes is None


def test_host_reading_agrees_with_the_kernels_files() -> None:
    before = _kernel_cpu_seconds()
    reading = read_host()
    after = _kernel_cpu_seconds()
    assert before - 0.1 <= sum(reading.cpu) <= after + 0.1
    assert reading.ram_total_bytes == psutil.virtual_memory().total
    assert 0 < reading.ram_used_bytes < reading.ram_total_bytes
    assert reading.has_iowait


def _kernel_cpu_seconds() -> float:
    with open("/proc/stat", encoding="ascii") as file:  # noqa: PTH123
        # user nice system idle iowait irq softirq steal; guest times are in user and nice already
        fields = file.readline().split()[1:9]
    return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")


def test_host_that_lists_no_devices_has_missing_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_io_counters", lambda nowrap: None)
    monkeypatch.setattr(psutil, "net_io_counters", lambda nowrap: None)
    reading = read_host()
    assert reading.disk_read_bytes is None
    assert reading.disk_write_bytes is None
    assert reading.network_sent_bytes is None
    assert reading.network_received_bytes is None


# At a line on stdin: runs a child that burns CPU, waits for it, and tells what both used.
ROOT_THAT_RUNS_A_CHILD = """
import json, os, resource, sys
BURN = "import time\\nwhile time.process_time() < 0.4: pass"
def own():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
print(flush=True)
sys.stdin.readline()
before = own()
pid = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", BURN], {})
_, status, usage = os.wait4(pid, 0)
child = usage.ru_utime + usage.ru_stime
print(json.dumps({"status": status, "child_s": child, "own_s": own() - before}), flush=True)
sys.stdin.readline()
"""


def test_real_child_that_came_and_went_between_samples_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", ROOT_THAT_RUNS_A_CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as root_process:
        assert root_process.stdin is not None
        assert root_process.stdout is not None
        try:
            root_process.stdout.readline()
            sampling = HostSampler([root_process.pid])
            assert sampling.sample().run_cpu_seconds == 0.0
            root_process.stdin.write("go\n")
            root_process.stdin.flush()
            told = json.loads(root_process.stdout.readline())
            row = sampling.sample()
        finally:
            root_process.kill()
    assert told["status"] == 0
    assert told["child_s"] >= 0.4
    assert row.run_processes == 1
    # both sides count in ticks of 10 ms, in four counters
    assert row.run_cpu_seconds == pytest.approx(told["child_s"] + told["own_s"], abs=0.06)
