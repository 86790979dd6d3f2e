"""Ranks on this host, by their status files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.rows import write_status

from paceline.collectives.host import Process
from paceline.measure.telemetry.sampler import RankFinder, running_processes

HOST = "node-1"


@pytest.fixture
def finder(tmp_path: Path) -> RankFinder:
    return RankFinder(tmp_path, HOST)


def processes(finder: RankFinder) -> dict[int, Process]:
    return running_processes(finder.statuses())


def say(finder: RankFinder, rank: int, pid: int, **changes: Any) -> None:
    usual = {"host": HOST, "pid": pid, "start_ticks": 100 + pid, "boot_id": "b"}
    write_status(finder.files, rank, **{**usual, **changes})


def test_running_ranks_of_this_host_are_found(finder: RankFinder) -> None:
    assert processes(finder) == {}
    say(finder, 0, 10)
    say(finder, 1, 11, host="node-2")
    say(finder, 2, 12, state="done")
    assert processes(finder) == {0: Process(10, 110, "b")}
    assert sorted(finder.statuses()) == [0, 2]


def test_process_that_several_ranks_claim_is_left_out(finder: RankFinder) -> None:
    say(finder, 0, 10)
    say(finder, 1, 10)
    say(finder, 2, 12)
    assert processes(finder) == {2: Process(12, 112, "b")}


def test_rank_that_moves_to_another_process_is_followed(finder: RankFinder) -> None:
    say(finder, 0, 10)
    processes(finder)
    say(finder, 0, 20)
    assert processes(finder) == {0: Process(20, 120, "b")}


def test_unchanged_file_is_read_once(finder: RankFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    say(finder, 0, 10)
    processes(finder)
    monkeypatch.setattr("paceline.measure.telemetry.sampler.read_json", None)
    assert processes(finder) == {0: Process(10, 110, "b")}


def test_damaged_status_keeps_the_last_one_and_warns_once(finder, caplog) -> None:
    say(finder, 0, 10)
    processes(finder)
    for text in ("{", "[]"):
        finder.files.rank(0).status.write_text(text)
        os.utime(finder.files.rank(0).status, ns=(1, len(text)))
        assert processes(finder) == {0: Process(10, 110, "b")}
    assert len(caplog.records) == 1


def test_status_that_is_gone_is_forgotten(finder: RankFinder) -> None:
    say(finder, 0, 10)
    processes(finder)
    finder.files.rank(0).status.unlink()
    assert processes(finder) == {}
