"""The lock of a run directory."""

from __future__ import annotations

from pathlib import Path

from paceline.records.documents import LookRecord, Stopping, has_writer, only_writer
from paceline.records.layout import RunFiles


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
