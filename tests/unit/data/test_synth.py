"""Synthetic photos: the same bytes whoever paints them; colour does not tell the class."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from paceline.data import synth
from paceline.data._scenes import CLASSES
from paceline.data.images import decode, inspect
from paceline.errors import PacelineError, UsageError


def tree(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*.*")
    }


def test_the_same_bytes_whatever_the_number_of_workers(tmp_path: Path) -> None:
    seen = []
    alone = synth.synthesise(tmp_path / "a", "tiny", 13, 5, workers=1)
    synth.synthesise(
        tmp_path / "b", "tiny", 13, 5, lambda done, total: seen.append((done, total)), workers=3
    )
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert len(tree(tmp_path / "a")) == 13 == sum(alone.class_counts.values())
    assert seen == [(done, 13) for done in range(1, 14)]
    more = synth.synthesise(tmp_path / "c", "tiny", 15, 5)
    assert tree(tmp_path / "a").items() < tree(tmp_path / "c").items()
    assert more.total_bytes == sum(f.stat().st_size for f in (tmp_path / "c").rglob("*.*"))


def test_seed_and_preset_change_the_photos() -> None:
    photo = synth.photo_bytes("tiny", 0, 3)
    assert photo == synth.photo_bytes("tiny", 0, 3)
    assert photo != synth.photo_bytes("tiny", 1, 3)


@pytest.mark.parametrize("preset", synth.PRESETS)
def test_sizes_are_natural_and_mixed(preset: str) -> None:
    low, high = synth.PRESETS[preset].shorter_side
    infos = [inspect(synth.photo_bytes(preset, 0, index)) for index in range(8)]
    assert all(low <= min(i.width, i.height) <= high for i in infos)
    assert len({(i.width, i.height) for i in infos}) > 4
    assert {i.width > i.height for i in infos} == {True, False}


def test_presets_have_the_papers_numbers_in_slightly_uneven_classes() -> None:
    assert {name: preset.images for name, preset in synth.PRESETS.items()} == {
        "complex-small": 791, "simple-big": 6003, "tiny": 96,
    }  # fmt: skip
    for images in (96, 791, 6003):
        classes = [synth.class_of(index) for index in range(images)]
        counts = sorted(map(classes.count, CLASSES))
        assert counts[0] < counts[-1] < 1.25 * counts[0]


def test_names_are_unique() -> None:
    names = [synth.photo_name("complex-small", 0, index) for index in range(791)]
    assert len({name.casefold() for name in names}) == 791


def test_mean_colour_does_not_tell_the_class() -> None:
    """A nearest-mean-colour classifier stays far below what a network learns (chance is 0.36)."""
    images = np.stack([decode(synth.photo_bytes("tiny", 11, index), 32) for index in range(450)])
    colours = images.reshape(450, -1, 3).astype(float)
    features = np.concatenate([colours.mean(axis=1), colours.std(axis=1)], axis=1)
    labels = np.array([CLASSES.index(synth.class_of(index)) for index in range(450)])
    features = (features - features[:300].mean(axis=0)) / features[:300].std(axis=0)
    centres = np.stack([features[:300][labels[:300] == k].mean(axis=0) for k in range(3)])
    distance = ((features[300:, None] - centres) ** 2).sum(axis=2)
    assert (distance.argmin(axis=1) == labels[300:]).mean() < 0.65


@pytest.mark.parametrize(
    ("preset", "images", "seed"),
    [("huge", None, 0), ("tiny", 2, 0), ("tiny", 0, 0), ("tiny", 9, -1)],
)
def test_wrong_values_are_refused(
    tmp_path: Path, preset: str, images: int | None, seed: int
) -> None:
    with pytest.raises(UsageError):
        synth.synthesise(tmp_path / "out", preset, images, seed)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="holds something"):
        synth.synthesise(tmp_path, "tiny", 6)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_failed_worker_is_reported_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The workers inherit a class folder that is in the way of the photo's own.
    monkeypatch.setattr(synth, "CLASSES", ("elsewhere",))
    with pytest.raises(PacelineError, match=r"a worker ended with status 1: .*No such file"):
        synth.synthesise(tmp_path / "out", "tiny", 6, workers=2)
    assert list(tmp_path.iterdir()) == []
