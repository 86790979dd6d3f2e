"""Synthetic images: reproducible, natural in size, and learnable by shape, not by mean colour."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec.extensions import WORKLOADS
from paceline.train.data import synth
from paceline.train.data.images import decode, inspect
from paceline.train.data.synth import CLASSES
from paceline.train.training.task import to_input
from paceline.train.workloads.build import build_model, make_task

TRAINING, TEST = 450, 150
CHANCE = 9 / 25  # share of the most frequent class


@pytest.fixture(scope="module")
def images() -> NDArray[np.uint8]:
    """The first images of `tiny`, 32x32 pixels."""
    return np.stack(
        [decode(synth.image_bytes("tiny", 7, index), 32) for index in range(TRAINING + TEST)]
    )


@pytest.fixture(scope="module")
def labels() -> NDArray[np.int64]:
    return np.array([CLASSES.index(synth.class_of(index)) for index in range(TRAINING + TEST)])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The network is too small for more: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*.*")
    }


def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    seen = []
    synth.synthesise(tmp_path / "a", "tiny", 13, 5, workers=1)
    synth.synthesise(
        tmp_path / "b", "tiny", 13, 5, lambda done, total: seen.append((done, total)), workers=3
    )
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert len(hashes(tmp_path / "a")) == 13
    assert seen == [(done, 13) for done in range(1, 14)]
    synth.synthesise(tmp_path / "c", "tiny", 15, 5)
    assert hashes(tmp_path / "a").items() < hashes(tmp_path / "c").items()


def test_seed_and_preset_change_the_images() -> None:
    image = synth.image_bytes("tiny", 0, 3)
    assert image == synth.image_bytes("tiny", 0, 3)
    assert image != synth.image_bytes("tiny", 1, 3)
    assert image != synth.image_bytes("complex-small", 0, 3)


@pytest.mark.parametrize("preset", WORKLOADS.names())
def test_files_and_sides_have_natural_and_mixed_sizes(preset: str) -> None:
    """Bits per pixel: photographs have 0.9 to 2.1 at these JPEG qualities (see scenes.py)."""
    low, high = WORKLOADS.get(preset).shorter_side
    files = [synth.image_bytes(preset, 0, index) for index in range(12)]
    infos = [inspect(data) for data in files]
    assert all(low <= min(info.width, info.height) <= high for info in infos)
    assert len({(info.width, info.height) for info in infos}) > 4
    assert {info.width > info.height for info in infos} == {True, False}
    bits = [
        8 * len(data) / (info.width * info.height) for data, info in zip(files, infos, strict=True)
    ]
    assert 0.9 <= median(bits) <= 2.1
    assert min(bits) >= 0.5
    assert max(bits) <= 4


def test_presets_have_the_papers_numbers_in_slightly_uneven_classes() -> None:
    counts = {name: WORKLOADS.get(name).samples for name in ("complex-small", "simple-big", "tiny")}
    assert counts == {"complex-small": 791, "simple-big": 6003, "tiny": 96}
    for count in (96, 791, 6003):
        classes = [synth.class_of(index) for index in range(count)]
        sizes = sorted(map(classes.count, CLASSES))
        assert sizes[0] < sizes[-1] < 1.25 * sizes[0]


def test_names_are_unique() -> None:
    names = [synth.image_name("complex-small", 0, index) for index in range(791)]
    assert len({name.casefold() for name in names}) == 791


def test_colour_statistics_do_not_decide_the_class(images, labels) -> None:
    """A nearest-mean classifier of mean and deviation of the colours stays below a network."""
    colours = images.reshape(len(images), -1, 3).astype(float)
    features = np.concatenate([colours.mean(axis=1), colours.std(axis=1)], axis=1)
    known, classes = features[:TRAINING], labels[:TRAINING]
    features = (features - known.mean(axis=0)) / known.std(axis=0)
    centres = np.stack([features[:TRAINING][classes == k].mean(axis=0) for k in range(3)])
    distance = ((features[TRAINING:, None] - centres) ** 2).sum(axis=2)
    assert (distance.argmin(axis=1) == labels[TRAINING:]).mean() < 0.5


@pytest.mark.soak
@pytest.mark.usefixtures("one_thread")
def test_a_small_network_learns_the_classes(images, labels) -> None:
    """Measured: 0.68 after twelve epochs; the standard deviation of chance is 0.04."""
    inputs, targets = to_input(images, "contiguous"), torch.from_numpy(labels)
    model = build_model(make_task("tiny", classes=3, dropout=False, seed=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for epoch in range(12):
        order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(16):
            mirrored = inputs[batch].flip(3) if epoch % 2 else inputs[batch]
            optimizer.zero_grad()
            cross_entropy(model(mirrored), targets[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        predicted = model(inputs[TRAINING:]).argmax(dim=1)
    assert (predicted == targets[TRAINING:]).float().mean() > CHANCE + 0.2


@pytest.mark.parametrize(
    ("preset", "count", "seed"),
    [("huge", None, 0), ("tiny", 2, 0), ("tiny", 0, 0), ("tiny", 9, -1)],
)
def test_wrong_values_are_refused(tmp_path, preset, count, seed) -> None:
    with pytest.raises(UsageError):
        synth.synthesise(tmp_path / "out", preset, count, seed)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        synth.synthesise(tmp_path, "tiny", 6)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_failed_write_is_raised_and_nothing_is_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(synth, "class_of", lambda _: "no_such_folder")
    with pytest.raises(EnvironmentLacks, match="No such file"):
        synth.synthesise(tmp_path / "out", "tiny", 6, workers=2)
    assert list(tmp_path.iterdir()) == []


def test_opencv_starts_no_threads_of_its_own(tmp_path: Path) -> None:
    synth.synthesise(tmp_path / "out", "tiny", 3)
    assert cv2.getNumThreads() == 1
