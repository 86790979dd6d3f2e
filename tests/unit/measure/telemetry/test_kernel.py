"""Own readers, on a fabricated /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
from tests.unit.fabricated_cgroups import Machine

from paceline.collectives.host import Stat, read_stat
from paceline.measure.telemetry.host_reading import (
    CgroupReader,
    read_page_faults,
    read_pressure,
    read_process_io,
    read_thread_switches,
)


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_pressure_is_in_seconds_where_the_kernel_has_it(tmp_path: Path) -> None:
    assert read_pressure(tmp_path) == {}
    write(
        tmp_path,
        pressure__cpu="some avg10=1.50 avg60=0 avg300=0 total=2500000\n",
        pressure__io="some avg10=0 total=3000000\nfull avg10=0 total=1000000\n",
    )
    assert read_pressure(tmp_path) == {"cpu": {"some_s": 2.5}, "io": {"some_s": 3.0, "full_s": 1.0}}


def test_major_page_faults_are_not_minor_ones(tmp_path: Path) -> None:
    write(tmp_path, vmstat="nr_free_pages 5\npgfault 100\npgmajfault 30\n")
    assert read_page_faults(tmp_path) == {"minor": 70, "major": 30}
    write(tmp_path, vmstat="nr_free_pages 5\n")
    assert read_page_faults(tmp_path) == {}


def test_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    after_name = f"Z 1 7 7 0 -1 0 0 0 0 0 {ticks} {ticks} {2 * ticks} 0 20 0 3 0 4711 9999 5 0"
    write(tmp_path, **{"7__stat": f"7 (a) R 5 (b) {after_name}\n"})
    assert read_stat(7, tmp_path) == Stat(
        is_running=False, parent=1, start_ticks=4711, cpu_s=4.0, threads=3, rss_bytes=5 * page
    )
    assert read_stat(8, tmp_path) is None


def test_process_agrees_with_psutil() -> None:
    one, used = read_stat(os.getpid()), psutil.Process()
    times, written = used.cpu_times(), used.io_counters().write_bytes
    assert one is not None
    assert one.is_running
    assert one.parent == used.ppid()
    assert one.cpu_s == pytest.approx(sum(times[:4]), abs=1.0)
    assert one.start_ticks == pytest.approx(
        (used.create_time() - psutil.boot_time()) * os.sysconf("SC_CLK_TCK"), abs=200
    )
    assert one.threads == used.num_threads()
    assert one.rss_bytes == pytest.approx(used.memory_info().rss, rel=0.1)
    bytes_now = read_process_io(os.getpid())
    assert bytes_now is not None
    assert bytes_now[1] >= written


def test_bytes_of_a_process_may_be_unreadable(tmp_path, monkeypatch) -> None:
    write(tmp_path, **{"7__io": "rchar: 1\nread_bytes: 5\nwrite_bytes: 6\n"})
    assert read_process_io(7, tmp_path) == (5, 6)
    assert read_process_io(8, tmp_path) is None, "a kernel that does not count them"

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    assert read_process_io(7, tmp_path) is None


def test_context_switches_are_read_by_thread(tmp_path: Path) -> None:
    status = (
        "Name:\tx\nThreads:\t2\nvoluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t{}\n"
    )
    write(
        tmp_path,
        **{"7__task__7__status": status.format(5, 6), "7__task__9__status": status.format(70, 80)},
        **{"7__task__11__status": "Name:\tended\n"},
    )
    assert read_thread_switches(7, tmp_path) == {7: (5, 6), 9: (70, 80)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def reader(machine: Machine, *times_s: float) -> CgroupReader:
    times = iter(times_s)
    return CgroupReader(7, machine.proc, lambda: next(times, 0.0))


EXPECTED = {
    "cpu_limit_cores": 1.5,
    "cpu_s": 2.5,
    "throttled_s": 0.75,
    "throttled_periods": 8,
    "memory_limit_bytes": 8192,
    "memory_used_bytes": 4096,
}


def test_v2_counters_are_in_seconds_and_bytes(machine: Machine) -> None:
    machine.enter("/job")
    machine.file("job/cpu.max", "150000 100000\n")
    machine.file(
        "job/cpu.stat",
        "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n"
        "nr_periods 40\nnr_throttled 8\nthrottled_usec 750000\n",
    )
    machine.file("job/memory.max", "8192\n")
    machine.file("job/memory.current", "4096\n")
    assert reader(machine).read() == EXPECTED


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
    assert reader(machine).read() == EXPECTED


def test_group_that_counts_only_cpu_time_has_only_that(machine: Machine) -> None:
    machine.enter("/")
    machine.file("cpu.stat", "usage_usec 1000000\nuser_usec 1000000\nsystem_usec 0\n")
    assert reader(machine).read() == {"cpu_s": 1.0}


def test_without_control_groups_or_without_the_process_there_is_no_usage(machine) -> None:
    assert reader(machine).read() == {}
    machine.process(7, "")
    assert reader(machine).read() == {}


def test_counters_are_read_each_time_and_limits_every_five_seconds(machine: Machine) -> None:
    machine.enter("/job")
    machine.file("job/memory.current", "10\n")
    machine.file("job/memory.max", "100\n")
    reading = reader(machine, 0.0, 4.0, 5.0)
    reading.read()
    machine.file("job/memory.current", "20\n")
    machine.file("job/memory.max", "200\n")
    within, after = reading.read(), reading.read()
    assert (within["memory_used_bytes"], within["memory_limit_bytes"]) == (20, 100)
    assert (after["memory_used_bytes"], after["memory_limit_bytes"]) == (20, 200)


def test_process_that_moves_to_another_group_is_followed(machine: Machine) -> None:
    machine.enter("/a")
    machine.file("a/memory.current", "1\n")
    machine.file("b/memory.current", "2\n")
    reading = reader(machine, 0.0, 5.0)
    before = reading.read()
    (machine.proc / "7" / "cgroup").write_text("0::/b\n")
    after = reading.read()
    assert (before["memory_used_bytes"], after["memory_used_bytes"]) == (1, 2)


def test_this_machine_can_be_read() -> None:
    found = CgroupReader(os.getpid())
    before = found.read()
    if "cpu_s" not in before:
        pytest.skip("the control groups of this machine do not count CPU time")
    used_s = time.process_time()
    while time.process_time() - used_s < 0.1:
        pass
    after = found.read()
    assert after["cpu_s"] - before["cpu_s"] >= 0.05
