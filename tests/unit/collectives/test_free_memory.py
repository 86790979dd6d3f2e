"""Memory that control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.fabricated_cgroups import Machine

from paceline.collectives.host import available_bytes, kills_for_memory, memory_room_bytes


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_available_memory_is_the_least_of_system_and_control_group(tmp_path):
    machine = Machine(tmp_path)
    machine.mount("", "cgroup2", "rw")
    machine.process("self", "0::/job\n")
    (machine.proc / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable: 32 kB\nHugePages: 0\n")
    assert available_bytes(machine.proc) == 32768
    machine.file("job/memory.max", "10000\n")
    machine.file("job/memory.current", "9000\n")
    assert available_bytes(machine.proc) == 1000
    machine.file("job/memory.current", "10000\n")
    assert available_bytes(machine.proc) == 0


@pytest.mark.parametrize(("text", "kills"), [("pgfault 9\noom_kill 3\n", 3), ("pgfault 9\n", 0)])
def test_kills_for_memory_are_those_of_the_kernel(tmp_path: Path, text: str, kills: int) -> None:
    (tmp_path / "vmstat").write_text(text)
    assert kills_for_memory(tmp_path) == kills
    assert kills_for_memory() >= 0


def test_room_is_the_least_on_the_way_up_with_the_page_cache_counted_as_free(
    machine: Machine,
) -> None:
    machine.enter("/job/step")
    assert memory_room_bytes(7, machine.proc) is None
    machine.file("job/step/memory.max", "10000\n")
    machine.file("job/step/memory.current", "9000\n")
    machine.file("job/step/memory.stat", "anon 1\ninactive_file 500\n")
    assert memory_room_bytes(7, machine.proc) == 1500
    machine.file("job/memory.max", "20000\n")
    machine.file("job/memory.current", "19900\n")
    assert memory_room_bytes(7, machine.proc) == 100


def test_v1_group_that_is_over_its_limit_has_no_room(machine: Machine) -> None:
    machine.mount("memory", "cgroup", "rw,memory")
    machine.process(7, "9:memory:/job\n")
    machine.file("memory/job/memory.limit_in_bytes", "5000\n")
    machine.file("memory/job/memory.usage_in_bytes", "6000\n")
    machine.file("memory/job/memory.stat", "total_inactive_file 300\n")
    assert memory_room_bytes(7, machine.proc) == 0
