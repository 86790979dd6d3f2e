"""Cached data sets: made once, under a lock, whole or not at all."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.train.data import catalogue


@pytest.fixture
def ingested(monkeypatch: pytest.MonkeyPatch, uneven: Any) -> list[tuple[int, int]]:
    """Stands for Spark: records images and seed, copies a ready data set."""
    calls = []

    def fake(images: Path, target: Path, *, seed: int, progress: Any) -> None:
        calls.append((sum(1 for _ in images.glob("*/*")), seed))
        if progress:
            progress(2 * calls[-1][0], 2 * calls[-1][0])
        shutil.copytree(uneven.path, target)

    monkeypatch.setattr("paceline.train.data.ingest.ingest", fake)
    return calls


def test_a_data_set_is_made_once_and_then_found(tmp_path, ingested) -> None:
    seen: list[tuple[int, int]] = []
    first = catalogue.ensure_dataset(
        "tiny", images=6, seed=3, cache_dir=tmp_path, progress=lambda *a: seen.append(a)
    )
    again = catalogue.ensure_dataset("tiny", images=6, seed=3, cache_dir=tmp_path)
    assert first == again == tmp_path / "datasets" / "tiny-6-seed3-v3"
    assert ingested == [(6, 3)]
    assert seen[-1] == (18, 18)
    assert [f.name for f in first.parent.iterdir() if f.is_dir()] == [first.name]
    assert catalogue.ensure_dataset("tiny", images=6, seed=4, cache_dir=tmp_path) != first


def test_a_failure_leaves_no_images_and_no_data_set(tmp_path, monkeypatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise EnvironmentLacks("no Java")

    monkeypatch.setattr("paceline.train.data.ingest.ingest", failing)
    with pytest.raises(EnvironmentLacks):
        catalogue.ensure_dataset("tiny", images=6, cache_dir=tmp_path)
    assert [f for f in (tmp_path / "datasets").iterdir() if f.is_dir()] == []


def test_waiting_for_another_maker_has_an_end(tmp_path, ingested) -> None:
    folder = tmp_path / "datasets"
    folder.mkdir()
    with (folder / ".tiny-6-seed0-v3.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimedOut, match="another process"):
            catalogue.ensure_dataset("tiny", images=6, cache_dir=tmp_path, lock_timeout_s=0.0)
    assert ingested == []


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tiny"):
        catalogue.ensure_dataset("huge", cache_dir=tmp_path)
