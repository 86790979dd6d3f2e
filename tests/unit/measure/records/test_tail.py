"""A file that grows is read on; one that was replaced or cut is read again from its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.measure.records.files import LineTail


def new_lines(tail: LineTail) -> tuple[bool, list[bytes]]:
    replaced = tail.was_replaced()
    if replaced:
        tail.rewind()
        tail.was_replaced()
    return replaced, list(tail.lines())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_lines_come_once_and_an_unfinished_one_when_it_is_whole(file: Path) -> None:
    tail = LineTail(file)
    assert new_lines(tail) == (False, []), "there is no file yet"
    file.write_text("one\ntw")
    assert new_lines(tail) == (False, [b"one"])
    assert new_lines(tail) == (False, [])
    with file.open("a") as more:
        more.write("o\nthree\n")
    assert new_lines(tail) == (False, [b"two", b"three"])
    assert new_lines(tail) == (False, [])


def test_another_file_in_its_place_is_read_from_the_start(file: Path) -> None:
    tail = LineTail(file)
    file.write_text("one\n")
    new_lines(tail)
    file.with_name("new").write_text("four\nfive\n")
    file.with_name("new").replace(file)
    assert new_lines(tail) == (True, [b"four", b"five"])


def test_shorter_file_is_read_from_the_start(file: Path) -> None:
    tail = LineTail(file)
    file.write_text("one\ntwo\n")
    new_lines(tail)
    file.write_text("six\n")
    assert new_lines(tail) == (True, [b"six"])
