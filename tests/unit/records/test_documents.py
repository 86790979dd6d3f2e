"""Documents of a run directory: its lock, statuses of ranks, looks at a ranking."""

from __future__ import annotations

from pathlib import Path

from paceline.records.documents import (
    LookRecord,
    Stopping,
    has_writer,
    only_writer,
    read_statuses,
)
from paceline.records.files import write_json
from paceline.records.layout import RunFiles, TrialFiles
from paceline.records.rows import RankStatus


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
