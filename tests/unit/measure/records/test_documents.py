"""Documents of a run directory: its lock, statuses of ranks, looks at a ranking."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rows import write_status

from paceline.base.errors import DataError
from paceline.measure.records.documents import (
    LookRecord,
    Stopping,
    exit_code_of,
    failure_of,
    has_writer,
    only_writer,
    read_reported,
    read_statuses,
)
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import Failure, RankStatus


@pytest.mark.parametrize(
    ("text", "kind", "message", "code"),
    [
        ("DataError: photo 3: is damaged", "DataError", "photo 3: is damaged", 4),
        ("Terminated: asked to end (SIGTERM)", "Terminated", "asked to end (SIGTERM)", 5),
        ("KeyError: 'x'", "KeyError", "'x'", 5),
        ("", "", "", 5),
    ],
)
def test_error_of_0_3_0_is_text(
    text: str, kind: str, message: str, code: int, tmp_path: Path
) -> None:
    files = TrialFiles(tmp_path)
    row = {"rank": 1, "host": "a", "pid": 7, "process_started_unix_s": 1.5, "state": "failed"}
    write_json(files.rank(1).status, {**row, "error": text, "secondary": False})
    [status] = read_statuses(files)
    assert status.error == Failure(kind=kind, message=message, rank=1, host="a")
    assert exit_code_of(status.error) == code


def test_failure_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = TrialFiles(tmp_path)
    error = failure_of(DataError("photo 3"), 1, "a")
    assert str(error) == "DataError: photo 3"
    write_status(files, 1, "failed", error)
    assert [status.error for status in read_statuses(files)] == [error]
    assert read_reported(files) is None
    write_json(files.reported, error)
    assert read_reported(files) == error


def test_lock_is_held_by_one_writer_and_seen_by_readers(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    assert not has_writer(run)
    with only_writer(run) as is_ours:
        assert is_ours
        assert has_writer(run)
        with only_writer(run) as is_second:
            assert not is_second
        assert has_writer(run)
    assert not has_writer(run)
    with only_writer(run) as is_ours:
        assert is_ours


def test_search_has_a_run_directory_within_that_of_its_run(tmp_path: Path) -> None:
    assert RunFiles(tmp_path).tune.root == tmp_path / "tune"


def test_level_of_a_ranking_is_that_of_the_last_look() -> None:
    looks = tuple(LookRecord(repeats=n, level=n / 100, undecided={}) for n in (2, 3))
    assert Stopping(max_repeats=9, tie_margin=0.03).level is None
    assert Stopping(max_repeats=9, tie_margin=0.03, looks=looks).level == 0.03


def test_statuses_are_those_of_ranks_that_have_written_one(tmp_path: Path) -> None:
    files = TrialFiles(tmp_path)
    written = RankStatus(rank=2, host="a", pid=7, process_started_unix_s=1.5, state="done")
    write_json(files.rank(2).status, written)
    files.rank(0).root.mkdir(parents=True)  # has not written one yet
    write_json(files.rank(1).status, {"rank": 1, "of_another_version": True})
    assert read_statuses(files) == [written]
