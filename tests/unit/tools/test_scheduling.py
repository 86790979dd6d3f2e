"""Which test files one worker runs."""

from __future__ import annotations

from tests.scheduling import ROOT, group_of


def test_files_with_labs_are_one_group() -> None:
    with_labs = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests" / "cluster").rglob("test_*.py")
        if "spark_lab" in path.read_text() or "checked_lab" in path.read_text()
    ]
    assert len(with_labs) >= 3
    assert {group_of(file) for file in with_labs} == {"lab"}


def test_other_files_are_a_group_each() -> None:
    file = "tests/unit/tools/test_lock.py"
    assert group_of(file) == file
