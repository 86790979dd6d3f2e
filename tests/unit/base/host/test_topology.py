from __future__ import annotations

import pytest
from tests.unit.fabricated_system import fabricate_system, two_sockets

from paceline.base.host.machine import (
    PhysicalCore,
    numa_cores,
    numa_nodes_of,
    parse_list,
    physical_cores,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0\n", [0]), ("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("\n", [])],
)
def test_lists_are_read_as_the_kernel_writes_them(text, numbers):
    assert parse_list(text) == numbers


def test_hardware_threads_of_a_core_are_found_node_by_node(tmp_path):
    system = two_sockets(tmp_path, cores=2)
    assert physical_cores(range(8), system) == [
        PhysicalCore(0, 0, (0, 4)),
        PhysicalCore(0, 0, (1, 5)),
        PhysicalCore(1, 1, (2, 6)),
        PhysicalCore(1, 1, (3, 7)),
    ]


def test_threads_that_may_not_be_used_are_left_out(tmp_path):
    system = two_sockets(tmp_path, cores=2)
    assert [core.threads for core in physical_cores([7, 5, 4], system)] == [(4,), (5,), (7,)]


def test_cores_numbered_across_nodes_come_node_by_node(tmp_path):
    system = fabricate_system(tmp_path, [[(0,), (2,)], [(1,), (3,)]])
    assert [core.threads[0] for core in physical_cores(range(4), system)] == [0, 2, 1, 3]
    assert numa_cores(system) == {0: [0, 2], 1: [1, 3]}
    assert numa_nodes_of([1, 3], system) == [1]
    assert numa_nodes_of([2, 3], system) == [0, 1]


def test_node_ten_comes_after_node_two_and_nodes_without_cores_are_none(tmp_path):
    system = fabricate_system(tmp_path, [[(0,)], []])
    for node, cores in (("node10", "9"), ("node2", "5")):
        (system / "node" / node).mkdir()
        (system / "node" / node / "cpulist").write_text(cores)
    assert list(numa_cores(system)) == [0, 2, 10]


def test_machine_that_tells_nothing_has_cores_without_siblings(tmp_path):
    assert physical_cores([3, 1], tmp_path) == [
        PhysicalCore(None, None, (1,)),
        PhysicalCore(None, None, (3,)),
    ]
    assert numa_cores(tmp_path) == {}
    assert numa_nodes_of([1, 3], tmp_path) == []


def test_damaged_files_count_as_missing(tmp_path):
    system = fabricate_system(tmp_path, [[(0, 1)]])
    (system / "cpu/cpu0/topology/thread_siblings_list").write_text("zero to one")
    (system / "node/node0/cpulist").write_text("?")
    assert [core.threads for core in physical_cores([0], system)] == [(0,)]
    assert numa_cores(system) == {}
