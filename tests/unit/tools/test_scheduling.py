"""Which test files one worker runs."""

from __future__ import annotations

from tests.scheduling import group_of


def test_files_that_share_a_spark_cluster_are_one_group() -> None:
    files = ["tests/cluster/test_lost_executors.py", "tests/cluster/test_two_nodes.py"]
    assert [group_of(file) for file in files] == ["spark_lab", "spark_lab"]


def test_other_files_are_a_group_each() -> None:
    file = "tests/unit/tools/test_lock.py"
    assert group_of(file) == file
