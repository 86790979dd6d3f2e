"""After a trial, what its script has made in the working folder is moved into the trial's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.measure.records.files import write_json
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import TouchedFilesRow
from paceline.runner.trials.run_trial import move_made_paths


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    (folder / "data").mkdir(parents=True)
    return folder


def aside(tmp_path, work, *ranks, resume=None):
    """Set aside what ranks have made; each: paths that it made, and paths that it read."""
    files = TrialFiles(tmp_path / "run" / "trials" / "first")
    for rank, (made, read) in enumerate(ranks):
        own = files.rank(rank)
        own.root.mkdir(parents=True)
        row = TouchedFilesRow(
            made=tuple(str(work / each) for each in made),
            read_changed_ns={str(work / each): 1 for each in read},
        )
        write_json(own.touched_files, row)
    script = SimpleNamespace(directory=str(work), resume=resume)
    move_made_paths(SimpleNamespace(training=SimpleNamespace(script=script)), files)
    return sorted(str(p.relative_to(files.made)) for p in files.made.rglob("*") if p.is_file())


def written(work, *paths):
    for each in paths:
        (work / each).parent.mkdir(parents=True, exist_ok=True)
        (work / each).write_text("1")


def test_files_and_folders_are_moved(tmp_path, work):
    written(work, "snapshot.pt", "out/log", "data/new", "data/given")
    moved = aside(tmp_path, work, (["snapshot.pt", "out"], []), (["out/log", "data/new"], []))
    assert moved == ["data/new", "out/log", "snapshot.pt"]
    assert [path.name for path in work.rglob("*")] == ["data", "given"]


def test_a_folder_in_which_a_rank_has_read_stays(tmp_path, work):
    written(work, "cache/tokens", "snapshot.pt")
    moved = aside(tmp_path, work, (["cache", "snapshot.pt"], []), ([], ["cache/tokens"]))
    assert moved == ["snapshot.pt"]
    assert (work / "cache/tokens").exists()


def test_what_is_gone_or_elsewhere_stays(tmp_path, work):
    written(work, "../beside")
    assert aside(tmp_path, work, (["gone", "../beside"], [])) == []
    assert (tmp_path / "beside").exists()


def test_a_training_that_is_to_be_resumed_keeps_its_checkpoint(tmp_path, work):
    written(work, "ckpt.pt")
    assert aside(tmp_path, work, (["ckpt.pt"], []), resume="a request") == []
    assert (work / "ckpt.pt").exists()
