"""Files of a run directory that somebody made to harm its reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.base.errors import DataError
from paceline.measure.records.documents import only_writer
from paceline.measure.records.files import read_json
from paceline.measure.records.layout import RunFiles


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000], ids=["lists", "objects"])
def test_deep_json_is_damage(tmp_path: Path, content: str) -> None:
    (tmp_path / "deep.json").write_text(content)
    with pytest.raises(DataError, match=r"deep\.json: expected"):
        read_json(tmp_path / "deep.json")


def test_the_lock_harms_no_file_that_it_links_to(tmp_path: Path) -> None:
    private, run = tmp_path / "private", RunFiles(tmp_path / "run")
    private.write_text("kept")
    run.root.mkdir()
    run.lock.symlink_to(private)
    with pytest.raises(OSError, match="symbolic links"), only_writer(run):
        pass
    assert private.read_text() == "kept"
