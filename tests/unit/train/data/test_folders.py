"""Class folders: what counts, what is ignored, what is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import DataError
from paceline.train.data.images import printable, scan


def put(root: Path, *names: str) -> None:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")


def test_classes_and_images_come_sorted_and_junk_is_left_out(tmp_path: Path) -> None:
    put(
        tmp_path,
        "b class/2.jpg", "b class/1.jpg", "b class/deep er/3.jpg", "ä/it's 100%.png", "ä/no suffix",
        "b class/._1.jpg", "b class/.DS_Store", "b class/Thumbs.db", "b class/__MACOSX/1.jpg",
        ".git/config", "__MACOSX/x.jpg", "README.txt",
    )  # fmt: skip
    folder = scan(tmp_path)
    assert folder.classes == ("b class", "ä")
    assert folder.others == ()
    assert [(p.path, p.label) for p in folder.images] == [
        ("b class/1.jpg", 0), ("b class/2.jpg", 0), ("b class/deep er/3.jpg", 0),
        ("ä/it's 100%.png", 1), ("ä/no suffix", 1),
    ]  # fmt: skip


def test_every_empty_class_folder_is_named(tmp_path: Path) -> None:
    put(tmp_path, "fire/1.jpg", "smoke/Thumbs.db")
    (tmp_path / "no_fire").mkdir()
    with pytest.raises(DataError, match=r"without an image: 'no_fire', 'smoke'"):
        scan(tmp_path)


@pytest.mark.parametrize("names", [(), ("only/1.jpg",), ("1.jpg", "2.jpg")])
def test_fewer_than_two_classes_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    put(tmp_path, *names)
    with pytest.raises(DataError, match="two or more classes"):
        scan(tmp_path)


def test_a_missing_folder_and_a_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        scan(tmp_path / "nowhere")
    put(tmp_path, "file")
    with pytest.raises(DataError, match="not a folder"):
        scan(tmp_path / "file")


def test_names_that_are_not_text_are_shown_escaped(tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg", "b/1.jpg")
    (tmp_path / "b/1.jpg").rename(tmp_path / os.fsdecode(b"b/\xff.jpg"))
    assert printable(scan(tmp_path).images[1].path) == "b/\\xff.jpg"


def test_texts_and_tables_in_class_folders_are_left_out_and_listed(tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg", "a/readme.txt", "b/2.png", "b/deep/Labels.CSV", "b/3.gif")
    folder = scan(tmp_path)
    assert [image.path for image in folder.images] == ["a/1.jpg", "b/2.png", "b/3.gif"]
    assert sorted(folder.others) == ["a/readme.txt", "b/deep/Labels.CSV"]


def test_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch) -> None:
    put(tmp_path, "a/1.jpg", "b/1.jpg")
    real = os.scandir

    def scandir(path: str) -> Any:  # as for another user: root may read everything
        if os.fspath(path) == str(tmp_path / "b"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=rf"{tmp_path}/b: the folder cannot be read \(Perm"):
        scan(tmp_path)
