"""What a control group uses, from files as v1 and v2 lay them out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.unit.fabricated_cgroups import Machine

from paceline.records.rows import CgroupSample
from paceline.telemetry.cgroup_usage import CgroupReader
from paceline.telemetry.seldom import Clocks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def reader(machine: Machine, times_s: list[float] | None = None) -> CgroupReader:
    ticks = iter(times_s or [])
    clocks = Clocks(monotonic_s=lambda: next(ticks, 0.0), cpu_s=lambda: 0.0)
    return CgroupReader(7, proc=machine.proc, clocks=clocks)


def test_v2_counters_are_in_seconds_and_bytes(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw")
    machine.process(7, "0::/job\n")
    machine.file("job/cpu.max", "150000 100000\n")
    machine.file(
        "job/cpu.stat",
        "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n"
        "nr_periods 40\nnr_throttled 8\nthrottled_usec 750000\n",
    )
    machine.file("job/memory.max", "8192\n")
    machine.file("job/memory.current", "4096\n")
    assert reader(machine).read() == CgroupSample(
        cpu_limit_cores=1.5,
        cpu_s=2.5,
        throttled_s=0.75,
        throttled_periods=8,
        memory_limit_bytes=8192,
        memory_used_bytes=4096,
    )


def test_v1_counters_are_in_seconds_and_bytes(machine: Machine) -> None:
    machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    machine.mount("memory", "cgroup", "rw,memory")
    machine.process(7, "9:memory:/c\n4:cpu,cpuacct:/c\n")
    machine.file("cpu,cpuacct/c/cpuacct.usage", "2500000000\n")
    machine.file(
        "cpu,cpuacct/c/cpu.stat", "nr_periods 40\nnr_throttled 8\nthrottled_time 750000000\n"
    )
    machine.file("cpu,cpuacct/c/cpu.cfs_quota_us", "150000\n")
    machine.file("cpu,cpuacct/c/cpu.cfs_period_us", "100000\n")
    machine.file("memory/c/memory.limit_in_bytes", "8192\n")
    machine.file("memory/c/memory.usage_in_bytes", "4096\n")
    assert reader(machine).read() == CgroupSample(
        cpu_limit_cores=1.5,
        cpu_s=2.5,
        throttled_s=0.75,
        throttled_periods=8,
        memory_limit_bytes=8192,
        memory_used_bytes=4096,
    )


def test_group_that_counts_only_cpu_time_says_so(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw")
    machine.process(7, "0::/\n")
    machine.file("cpu.stat", "usage_usec 1000000\nuser_usec 1000000\nsystem_usec 0\n")
    assert reader(machine).read() == CgroupSample(cpu_s=1.0)


def test_host_without_control_groups_has_no_sample(machine: Machine) -> None:
    machine.process(7, "")
    assert reader(machine).read() is None


def test_counters_are_read_each_time_and_limits_every_five_seconds(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw")
    machine.process(7, "0::/job\n")
    machine.file("job/memory.current", "10\n")
    machine.file("job/memory.max", "100\n")
    reading = reader(machine, times_s=[0.0, 4.0, 5.0])
    reading.read()
    machine.file("job/memory.current", "20\n")
    machine.file("job/memory.max", "200\n")
    within = reading.read()
    assert within is not None
    assert (within.memory_used_bytes, within.memory_limit_bytes) == (20, 100)
    after = reading.read()
    assert after is not None
    assert (after.memory_used_bytes, after.memory_limit_bytes) == (20, 200)


def test_process_that_is_moved_is_followed(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw")
    machine.process(7, "0::/a\n")
    machine.file("a/memory.current", "1\n")
    machine.file("b/memory.current", "2\n")
    reading = reader(machine)
    before = reading.read()
    (machine.proc / "7" / "cgroup").write_text("0::/b\n")
    after = reading.read(deep=True)
    assert before is not None
    assert after is not None
    assert (before.memory_used_bytes, after.memory_used_bytes) == (1, 2)


def test_process_that_has_ended_has_no_sample(machine: Machine) -> None:
    assert reader(machine).read() is None


def test_this_machine_can_be_read() -> None:
    sample = CgroupReader(os.getpid()).read()
    assert sample is None or sample.cpu_s is None or sample.cpu_s > 0
