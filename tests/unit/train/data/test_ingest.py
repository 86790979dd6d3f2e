"""The arithmetic of ingest: row groups, their sizes and their order. Spark is in tests/cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from py4j.protocol import Py4JError

from paceline.base.errors import DataError, EnvironmentLacks, UsageError
from paceline.train.data.dataset import open_dataset
from paceline.train.data.images import ImageFile, ImageFolder, ImageInfo
from paceline.train.data.ingest import (
    ImageFinding,
    examine,
    ingest,
    plan_row_groups,
    row_group_count,
    rows_of,
)
from paceline.train.data.ingest_spark import NewDataset
from paceline.train.data.manifest import ImageStats, SkippedImage
from paceline.train.data.synth import image_bytes


def folder_of(samples: int) -> tuple[ImageFolder, list[ImageFinding]]:
    images = tuple(ImageFile(f"c{i % 3}/{i}.jpg", i % 3) for i in range(samples))
    info = ImageInfo("JPEG", 10, 10, verbatim=True)
    findings = [ImageFinding(i, 1000, f"{i:064x}", info, "") for i in range(samples)]
    return ImageFolder(Path("/images"), ("c0", "c1", "c2"), images), findings


@settings(derandomize=True, deadline=None)  # the same cases on every run, however busy the machine
@given(
    samples=st.integers(1, 400),
    seed=st.integers(0, 9),
    rows=st.one_of(st.none(), st.integers(1, 500)),
)
def test_row_groups_are_even_and_hold_every_image_once(samples, seed, rows) -> None:
    plan = plan_row_groups(*folder_of(samples), seed, rows)
    sizes = [len(group) for group in plan]
    assert max(sizes) - min(sizes) <= 1
    items = [item for group in plan for item in group]
    assert [item.sample_id for item in items] == list(range(samples))
    assert {item.path for item in items} == {f"c{i % 3}/{i}.jpg" for i in range(samples)}
    assert all(item.label == int(item.path[1]) for item in items)


@pytest.mark.parametrize(
    ("samples", "total_bytes", "rows", "expected"),
    [
        (6003, 700_000_000, None, 94),  # 64 rows each
        (791, 100_000_000, None, 16),  # at least 16
        (10, 1000, None, 10),  # no empty ones
        (1000, 2**30, None, 64),  # 16 MiB each
        (20_000, 2**30, None, 256),  # more rows each, 4 MiB
        (100_000, 10 * 2**30, None, 256),  # 40 MiB each
        (1_280_000, 140 * 2**30, None, 2240),  # 64 MiB each
        (100, 1000, 30, 4),
        (100, 1000, 1000, 1),
    ],
)
def test_number_of_row_groups(samples, total_bytes, rows, expected) -> None:
    assert row_group_count(samples, total_bytes, rows) == expected


def test_the_seed_orders_the_samples_and_mixes_classes() -> None:
    one, again, other = (plan_row_groups(*folder_of(300), seed, None) for seed in (1, 1, 2))
    assert one == again != other
    assert all(len({item.label for item in group}) == 3 for group in one)


@pytest.mark.parametrize(
    "change", [{"on_bad_image": "ignore"}, {"row_group_rows": 0}, {"seed": -1}]
)
def test_wrong_options_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"{next(iter(change))}: expected"):
        ingest(tmp_path, tmp_path / "out", **change)


def test_an_existing_target_is_refused_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        ingest(tmp_path / "images", tmp_path / "out")


def test_a_image_changed_between_the_passes_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "c0").mkdir()
    (tmp_path / "c0/0.jpg").write_bytes(image_bytes("tiny", 0, 0))
    folder, _ = folder_of(1)
    (finding,) = examine(str(tmp_path), [(0, "c0/0.jpg")])
    (group,) = plan_row_groups(folder, [finding], 0, None)
    ((sample_id, label, data, _, source),) = rows_of(str(tmp_path), group)
    assert (sample_id, label, bytes(data), source) == (0, 0, image_bytes("tiny", 0, 0), "c0/0.jpg")
    (tmp_path / "c0/0.jpg").write_bytes(image_bytes("tiny", 0, 1))
    with pytest.raises(DataError, match=r"c0/0\.jpg: the image was changed"):
        list(rows_of(str(tmp_path), group))


def test_a_image_that_cannot_be_read_is_a_bad_image(tmp_path: Path) -> None:
    (finding,) = examine(str(tmp_path), [(4, "gone.jpg")])
    assert (finding.index, finding.info) == (4, None)
    assert "No such file" in finding.reason


@pytest.mark.parametrize("url", ["hdfs://host/data", "s3://bucket/data"])
def test_storage_of_a_cluster_needs_its_job(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match=r"expected a local folder .* spark-jobs/ingest.py"):
        ingest(tmp_path, url)


def test_summary_of_a_manifest_says_what_was_ingested(uneven: Any) -> None:
    stats = ImageStats(
        total_bytes=1, mean_bytes=1, width_min=1, width_max=1, height_min=1, height_max=1,
        reencoded=12,
    )  # fmt: skip
    manifest = open_dataset(uneven.path).manifest.model_copy(
        update={
            "samples": 21, "classes": tuple("abcdef"), "class_counts": (1, 2, 3, 4, 5, 6),
            "image_stats": stats, "skipped": (SkippedImage(path="a", reason="damaged"),),
        }
    )  # fmt: skip
    assert manifest.summary == (
        "21 images, 6 classes (a 1, b 2, c 3, d 4, e 5 and 1 more), 12 re-encoded, 1 skipped"
    )


class Connected:
    """A session of Spark Connect."""

    @property
    def sparkContext(self) -> object:  # noqa: N802  (Spark's name)
        raise NotImplementedError("sparkContext() is not implemented")


class Denied:
    """A session whose JVM may not be used."""

    @property
    def sparkContext(self) -> object:  # noqa: N802
        return SimpleNamespace(_jvm=self, _jsc=None)

    @property
    def org(self) -> object:
        raise Py4JError("Constructor Path is not whitelisted")


@pytest.mark.parametrize("session", [Connected(), Denied()])
def test_spark_without_access_to_its_jvm_is_refused(session, tmp_path) -> None:
    with pytest.raises(EnvironmentLacks, match=r"does not give access to them .* Spark Connect"):
        NewDataset(session, tmp_path / "new")
