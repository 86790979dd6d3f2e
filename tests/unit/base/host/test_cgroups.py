"""Limits from cgroup files as v1, v2 and containers lay them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.fabricated_cgroups import Machine

from paceline.base.host.cgroups import CgroupLimits, cpu_quotas, find_places, read_limits


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_v2_takes_the_tightest_limit_on_the_way_up(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw,nsdelegate")
    machine.process(7, "0::/slurm/job/step\n")
    machine.file("slurm/job/step/cpu.max", "max 100000\n")
    machine.file("slurm/job/step/memory.max", "8589934592\n")
    machine.file("slurm/job/cpu.max", "250000 100000\n")
    machine.file("slurm/job/memory.max", "4294967296\n")
    machine.file("slurm/cpu.max", "800000 100000\n")
    machine.file("slurm/memory.max", "max\n")
    assert read_limits(7, machine.proc) == CgroupLimits(cpus=2.5, memory_bytes=4294967296)


def test_v2_without_limits_has_none(machine: Machine) -> None:
    machine.enter("/user.slice")
    machine.file("user.slice/cpu.max", "max 100000\n")
    machine.file("user.slice/memory.max", "max\n")
    assert read_limits(7, machine.proc) == CgroupLimits(cpus=None, memory_bytes=None)


def test_v2_in_a_container_whose_path_is_the_hosts(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw", root="/docker/abc")
    machine.process(7, "0::/docker/abc\n")
    machine.file("cpu.max", "50000 100000\n")
    machine.file("memory.max", "1048576\n")
    assert read_limits(7, machine.proc) == CgroupLimits(cpus=0.5, memory_bytes=1048576)


def test_v1_reads_each_controller_where_it_is_mounted(machine: Machine) -> None:
    machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    machine.mount("memory", "cgroup", "rw,memory")
    machine.mount("unified", "cgroup2", "rw")
    machine.process(7, "9:memory:/yarn/c1\n4:cpu,cpuacct:/yarn/c2\n1:name=systemd:/x\n0::/\n")
    machine.file("cpu,cpuacct/yarn/c2/cpu.cfs_quota_us", "300000\n")
    machine.file("cpu,cpuacct/yarn/c2/cpu.cfs_period_us", "100000\n")
    machine.file("memory/yarn/c1/memory.limit_in_bytes", "2147483648\n")
    machine.file("memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert read_limits(7, machine.proc) == CgroupLimits(cpus=3.0, memory_bytes=2147483648)


def test_v1_without_limits_has_none(machine: Machine) -> None:
    machine.mount("cpu", "cgroup", "rw,cpu")
    machine.mount("memory", "cgroup", "rw,memory")
    machine.process(7, "9:memory:/\n4:cpu:/\n")
    machine.file("cpu/cpu.cfs_quota_us", "-1\n")
    machine.file("cpu/cpu.cfs_period_us", "100000\n")
    machine.file("memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert read_limits(7, machine.proc) == CgroupLimits(cpus=None, memory_bytes=None)


def test_v1_in_a_container_that_mounts_only_its_own_part(machine: Machine) -> None:
    machine.mount("memory", "cgroup", "rw,memory", root="/docker/abc")
    machine.process(7, "9:memory:/elsewhere/abc\n")
    machine.file("memory/memory.limit_in_bytes", "4096\n")
    assert read_limits(7, machine.proc) == CgroupLimits(cpus=None, memory_bytes=4096)


def test_host_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert read_limits(1, tmp_path) == CgroupLimits(cpus=None, memory_bytes=None)


def test_memory_limit_of_this_process_is_the_smallest_of_its_groups() -> None:
    root = Path("/sys/fs/cgroup")
    own = Path("/proc/self/cgroup").read_text("utf-8").splitlines()[-1]
    group = root / own.removeprefix("0::/")
    if not own.startswith("0::/") or not (group / "memory.max").exists():
        pytest.skip("this process has no group of version 2 that limits memory")
    files = [folder / "memory.max" for folder in (group, *group.parents)]
    texts = [file.read_text("utf-8").strip() for file in files if file.exists()]
    expected = min((int(text) for text in texts if text != "max"), default=None)
    assert read_limits(os.getpid()).memory_bytes == expected


def test_groups_that_two_processes_share_are_told_from_their_own(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw")
    machine.file("job/cpu.max", "300000 100000\n")
    machine.file("job/a/cpu.max", "200000 100000\n")
    machine.file("job/b/cpu.max", "max 100000\n")
    machine.process(7, "0::/job/a\n")
    machine.process(8, "0::/job/b\n")
    first, second = (cpu_quotas(pid, machine.proc) for pid in (7, 8))
    assert sorted(first.values()) == [2.0, 3.0]
    assert list(second.values()) == [3.0]
    assert second.items() <= first.items()


def test_group_has_the_same_name_from_a_container_that_mounts_it_elsewhere(tmp_path: Path) -> None:
    host = Machine(tmp_path)
    host.mount("", "cgroup2", "rw")
    host.file("job/cpu.max", "200000 100000\n")
    host.process(7, "0::/job\n")
    inside = Machine(tmp_path)
    inside.mount("job", "cgroup2", "rw")
    inside.process(8, "0::/\n")
    assert cpu_quotas(7, host.proc) == cpu_quotas(8, inside.proc) != {}


def test_without_control_groups_nothing_is_withheld(machine: Machine) -> None:
    machine.process(7, "")
    assert cpu_quotas(7, machine.proc) == {}


def test_v2_usage_is_that_of_the_group_whose_limit_is_the_tightest(machine: Machine) -> None:
    machine.enter("/pod/container")
    for group in ("pod", "pod/container"):
        machine.file(f"{group}/cpu.stat", "usage_usec 1\n")
        machine.file(f"{group}/memory.current", "1\n")
    machine.file("pod/cpu.max", "150000 100000\n")
    machine.file("pod/container/cpu.max", "max 100000\n")
    machine.file("pod/memory.max", "max\n")
    machine.file("pod/container/memory.max", "4096\n")
    places = find_places(7, machine.proc)
    assert places.limits == CgroupLimits(cpus=1.5, memory_bytes=4096)
    assert places.cpu_time == places.throttling == machine.sys / "pod/cpu.stat"
    assert places.memory == machine.sys / "pod/container/memory.current"


def test_usage_without_limits_is_that_of_the_processs_own_group(machine: Machine) -> None:
    machine.enter("/slice/job")
    for group in ("slice", "slice/job"):
        machine.file(f"{group}/cpu.stat", "usage_usec 1\n")
        machine.file(f"{group}/memory.current", "1\n")
    places = find_places(7, machine.proc)
    assert places.cpu_time == machine.sys / "slice/job/cpu.stat"
    assert places.memory == machine.sys / "slice/job/memory.current"


@pytest.mark.parametrize(("limited", "level"), [("a", "a"), ("a/b", "a/b"), (None, "a/b")])
def test_v1_time_is_that_of_the_same_group_in_a_hierarchy_of_its_own(
    machine: Machine, limited: str | None, level: str
) -> None:
    machine.mount("cpu", "cgroup", "rw,cpu")
    machine.mount("cpuacct", "cgroup", "rw,cpuacct")
    machine.mount("unified", "cgroup2", "rw")
    machine.process(7, "2:cpuacct:/a/b\n1:cpu:/a/b\n0::/\n")
    machine.file("unified/cpu.stat", "usage_usec 1\n")
    for group in ("a", "a/b"):
        machine.file(f"cpuacct/{group}/cpuacct.usage", "1\n")
        machine.file(f"cpu/{group}/cpu.stat", "nr_periods 0\n")
    if limited is not None:
        machine.file(f"cpu/{limited}/cpu.cfs_quota_us", "50000\n")
        machine.file(f"cpu/{limited}/cpu.cfs_period_us", "100000\n")
    places = find_places(7, machine.proc)
    assert places.cpu_time == machine.sys / "cpuacct" / level / "cpuacct.usage"
    assert places.throttling == machine.sys / "cpu" / level / "cpu.stat"


def test_v1_controllers_mounted_together_are_one_group(machine: Machine) -> None:
    machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    machine.mount("memory", "cgroup", "rw,memory")
    machine.process(7, "9:memory:/c\n4:cpu,cpuacct:/c\n")
    machine.file("cpu,cpuacct/c/cpuacct.usage", "1\n")
    machine.file("cpu,cpuacct/c/cpu.stat", "nr_periods 0\n")
    machine.file("memory/c/memory.usage_in_bytes", "1\n")
    places = find_places(7, machine.proc)
    assert places.cpu_time == machine.sys / "cpu,cpuacct/c/cpuacct.usage"
    assert places.throttling == machine.sys / "cpu,cpuacct/c/cpu.stat"
    assert places.memory == machine.sys / "memory/c/memory.usage_in_bytes"


def test_process_without_control_groups_has_no_usage(machine: Machine) -> None:
    machine.process(7, "")
    places = find_places(7, machine.proc)
    assert (places.cpu_time, places.throttling, places.memory) == (None, None, None)
