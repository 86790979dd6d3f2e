"""Which test files one worker runs, and in which order."""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import SimpleNamespace
from unittest.mock import Mock

from tests.support import scheduling
from tests.support.scheduling import GroupScheduling, group_of, places


def test_files_that_share_a_spark_cluster_are_one_group() -> None:
    files = ["tests/cluster/test_lost_executors.py", "tests/cluster/test_two_nodes.py"]
    assert [group_of(file) for file in files] == ["spark_lab", "spark_lab"]


def test_other_files_are_a_group_each() -> None:
    file = "tests/unit/tools/test_lock.py"
    assert group_of(file) == file


def test_shared_fixtures_come_first_then_folders_alternate_and_unit_tests_fill_the_gaps() -> None:
    files = [
        "tests/unit/a.py",
        "tests/unit/b.py",
        "tests/cluster/test_two_nodes.py",
        *(f"tests/contract/{number}.py" for number in range(4)),
        *(f"tests/functional/{number}.py" for number in range(2)),
    ]
    keys = places(files)
    assert sorted(files, key=lambda file: keys[file]) == [
        "tests/cluster/test_two_nodes.py",
        "tests/contract/0.py",
        "tests/functional/0.py",
        "tests/contract/1.py",
        "tests/contract/2.py",
        "tests/functional/1.py",
        "tests/contract/3.py",
        "tests/unit/a.py",
        "tests/unit/b.py",
    ]


def test_a_test_that_ended_its_worker_does_not_run_again() -> None:
    tests = GroupScheduling(SimpleNamespace(getvalue=lambda _: ["2*popen"]), None)
    tests.workqueue = OrderedDict()
    unit = {"a.py::first": True, "a.py::hangs": False, "a.py::last": False}
    tests.assigned_work = {"worker": {"a.py": unit}}
    assert tests.remove_node("worker") == "a.py::hangs"
    assert [test for test, is_over in tests.workqueue["a.py"].items() if not is_over] == [
        "a.py::last"
    ]


def test_workers_that_are_silent_are_named_and_the_session_ends(monkeypatch, capfd) -> None:
    interrupted = threading.Event()
    monkeypatch.setattr(scheduling, "_SILENT_S", 0.01)
    monkeypatch.setattr(scheduling._thread, "interrupt_main", interrupted.set)
    tests = GroupScheduling(SimpleNamespace(getvalue=lambda _: ["1*popen"]), None)
    node = Mock(shutting_down=True)
    node.gateway.id = "gw0"
    tests.registered_collections = {node: ["a.py::first", "a.py::hangs"]}
    tests.assigned_work = {node: {"a.py": {"a.py::first": False, "a.py::hangs": False}}}
    tests.mark_test_complete(node, 0)
    assert interrupted.wait(20.0)
    assert capfd.readouterr().err == "gw0: no end of a.py::hangs\n"
