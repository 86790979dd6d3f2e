"""Limits from cgroup files as v1, v2 and containers lay them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.records.cgroups import CgroupLimits, cpu_quotas, read_limits


class Machine:
    """A /proc and a /sys/fs/cgroup below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.sys = root / "sys fs"  # a space, as mountinfo escapes it
        self.mounts: list[str] = ["24 1 0:5 / / rw shared:1 - ext4 /dev/root rw"]

    def process(self, pid: int, groups: str) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(parents=True)
        (folder / "cgroup").write_text(groups)
        (folder / "mountinfo").write_text("\n".join(self.mounts) + "\n")

    def mount(self, folder: str, kind: str, options: str, root: str = "/") -> None:
        point = str(self.sys / folder).rstrip("/").replace(" ", r"\040")
        self.mounts.append(f"30 24 0:26 {root} {point} rw,nosuid - {kind} cgroup {options}")

    def file(self, path: str, text: str) -> None:
        (self.sys / path).parent.mkdir(parents=True, exist_ok=True)
        (self.sys / path).write_text(text)

    def limits(self, pid: int) -> CgroupLimits:
        return read_limits(pid, self.proc)


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
    assert machine.limits(7) == CgroupLimits(cpus=2.5, memory_bytes=4294967296)


def test_v2_without_limits_has_none(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw")
    machine.process(7, "0::/user.slice\n")
    machine.file("user.slice/cpu.max", "max 100000\n")
    machine.file("user.slice/memory.max", "max\n")
    assert machine.limits(7) == CgroupLimits(cpus=None, memory_bytes=None)


def test_v2_in_a_container_whose_path_is_the_hosts(machine: Machine) -> None:
    machine.mount("", "cgroup2", "rw", root="/docker/abc")
    machine.process(7, "0::/docker/abc\n")
    machine.file("cpu.max", "50000 100000\n")
    machine.file("memory.max", "1048576\n")
    assert machine.limits(7) == CgroupLimits(cpus=0.5, memory_bytes=1048576)


def test_v1_reads_each_controller_where_it_is_mounted(machine: Machine) -> None:
    machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    machine.mount("memory", "cgroup", "rw,memory")
    machine.mount("unified", "cgroup2", "rw")
    machine.process(7, "9:memory:/yarn/c1\n4:cpu,cpuacct:/yarn/c2\n1:name=systemd:/x\n0::/\n")
    machine.file("cpu,cpuacct/yarn/c2/cpu.cfs_quota_us", "300000\n")
    machine.file("cpu,cpuacct/yarn/c2/cpu.cfs_period_us", "100000\n")
    machine.file("memory/yarn/c1/memory.limit_in_bytes", "2147483648\n")
    machine.file("memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.limits(7) == CgroupLimits(cpus=3.0, memory_bytes=2147483648)


def test_v1_without_limits_has_none(machine: Machine) -> None:
    machine.mount("cpu", "cgroup", "rw,cpu")
    machine.mount("memory", "cgroup", "rw,memory")
    machine.process(7, "9:memory:/\n4:cpu:/\n")
    machine.file("cpu/cpu.cfs_quota_us", "-1\n")
    machine.file("cpu/cpu.cfs_period_us", "100000\n")
    machine.file("memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.limits(7) == CgroupLimits(cpus=None, memory_bytes=None)


def test_v1_in_a_container_that_mounts_only_its_own_part(machine: Machine) -> None:
    machine.mount("memory", "cgroup", "rw,memory", root="/docker/abc")
    machine.process(7, "9:memory:/elsewhere/abc\n")
    machine.file("memory/memory.limit_in_bytes", "4096\n")
    assert machine.limits(7) == CgroupLimits(cpus=None, memory_bytes=4096)


def test_host_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert read_limits(1, tmp_path) == CgroupLimits(cpus=None, memory_bytes=None)


def test_this_machine_can_be_read() -> None:
    limits = read_limits(os.getpid())
    assert limits.cpus is None or limits.cpus > 0
    assert limits.memory_bytes is None or limits.memory_bytes > 0


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


def test_group_has_the_same_name_from_a_container_that_mounts_it_elsewhere(
    tmp_path: Path,
) -> None:
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
