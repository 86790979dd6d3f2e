"""Class folders of photos to a Petastorm data set, through Spark.

Two passes, both in Spark tasks: every photo is decoded fully and judged; then the good ones, in a
seeded random order so that row groups mix the classes, are written, one row group a Parquet file.
The result is counted and its checksums compared before it appears under its name.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

import numpy as np

from paceline.data.folders import PhotoFolder, printable, scan
from paceline.data.ingest_session import local_session, spark_failures
from paceline.data.ingest_target import Target, open_target
from paceline.data.ingest_tasks import Assignment, Look, look_at_photos, rows_of
from paceline.data.ingest_watch import Watch, counted, watching
from paceline.data.manifest import DatasetManifest, ImageStats, RowGroup, SkippedPhoto
from paceline.data.petastorm_quiet import quiet_petastorm
from paceline.errors import DataError, UsageError
from paceline.plan.schedule import share_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

MIN_ROW_GROUPS = 16  # so that windows can be shuffled and ranks can share the reading
TARGET_ROWS = 64
TARGET_BYTES = 16 * 2**20
_BAD_SHOWN = 20
_LOOK_PHOTOS_PER_TASK = 32
_BLOCK_BYTES = 2**30  # Parquet's row-group limit, far above TARGET_BYTES: one group a file


def ingest(
    photos_dir: Path,
    out_dataset: str | Path,
    *,
    on_bad_image: Literal["fail", "skip"] = "fail",
    seed: int = 0,
    spark: SparkSession | None = None,
    row_group_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetManifest:
    """Write the photos of `photos_dir`/CLASS/ as a Petastorm data set; all of it or nothing.

    on_bad_image: whether a bad photo fails the ingest (all bad ones are named) or is left out and
    listed in the manifest. seed: of the samples' order. spark: a session to use, on whose
    executors `photos_dir` is visible; None starts a local one and ends it. row_group_rows: about
    how many photos a row group; None means about 64, at most about 16 MB, at least 16 row groups.
    progress(done, total) counts photos, twice over: looked at, then written.
    Raises DataError for bad photos or folders, UsageError if `out_dataset` holds something.
    """
    if on_bad_image not in ("fail", "skip"):
        raise UsageError(f"on_bad_image: expected fail or skip, got {on_bad_image!r}")
    if row_group_rows is not None and row_group_rows < 1:
        raise UsageError(f"row_group_rows: expected at least 1, got {row_group_rows}")
    target = open_target(out_dataset, spark)
    folder = scan(photos_dir)
    with ExitStack() as stack:
        if spark is None:
            spark = stack.enter_context(local_session(len(os.sched_getaffinity(0))))
        watch = stack.enter_context(watching(spark, 2 * len(folder.photos), progress))
        stack.enter_context(spark_failures())
        good, skipped = _judge(folder, _look(spark, folder, watch), on_bad_image)
        plan = plan_row_groups(folder, good, seed, row_group_rows)
        try:
            written = _write(spark, target, folder, plan, watch)
            manifest = _manifest(folder, good, skipped, seed, written)
            target.write_manifest(manifest.as_json())
            target.commit()
        except BaseException:
            target.discard()
            raise
        watch.finish()
    return manifest


def plan_row_groups(
    folder: PhotoFolder, good: Sequence[Look], seed: int, row_group_rows: int | None
) -> list[list[Assignment]]:
    """The samples of each row group; their numbers differ by at most one."""
    count = row_group_count(len(good), sum(look.size_bytes for look in good), row_group_rows)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(good))
    groups = []
    for group in range(count):
        low, high = share_bounds(len(good), group, count)
        groups.append([_assign(folder, good[order[i]], i) for i in range(low, high)])
    return groups


def row_group_count(samples: int, total_bytes: int, row_group_rows: int | None) -> int:
    """How many row groups to make of `samples` photos of `total_bytes` together."""
    if row_group_rows is not None:
        return -(-samples // row_group_rows)
    wanted = max(MIN_ROW_GROUPS, -(-samples // TARGET_ROWS), -(-total_bytes // TARGET_BYTES))
    return min(samples, wanted)


def _assign(folder: PhotoFolder, look: Look, sample_id: int) -> Assignment:
    photo = folder.photos[look.index]
    return Assignment(sample_id, photo.label, photo.path, look.sha256)


def _look(spark: SparkSession, folder: PhotoFolder, watch: Watch) -> list[Look]:
    """First pass: every photo decoded in a task; only the findings come to the driver."""
    root, counter = str(folder.root), watch.counter
    work = [(index, photo.path) for index, photo in enumerate(folder.photos)]
    tasks = max(1, len(work) // _LOOK_PHOTOS_PER_TASK)
    looks: list[Look] = (
        spark.sparkContext.parallelize(work, tasks)
        .mapPartitions(lambda photos: counted(counter, look_at_photos(root, photos)))
        .collect()
    )
    if [look.index for look in looks] != list(range(len(work))):
        raise DataError(f"{root}: Spark returned {len(looks)} findings for {len(work)} photos")
    return looks


def _judge(
    folder: PhotoFolder, looks: Sequence[Look], on_bad_image: str
) -> tuple[list[Look], list[SkippedPhoto]]:
    good = [look for look in looks if look.info is not None]
    bad = [
        SkippedPhoto(printable(folder.photos[look.index].path), look.reason)
        for look in looks
        if look.info is None
    ]
    if bad and on_bad_image == "fail":
        lines = [f"  {photo.path}: {photo.reason}" for photo in bad[:_BAD_SHOWN]]
        if len(bad) > _BAD_SHOWN:
            lines.append(f"  and {len(bad) - _BAD_SHOWN} more")
        raise DataError(
            f"{folder.root}: {len(bad)} of {len(looks)} photos cannot be used:\n"
            + "\n".join(lines)
            + "\nMend or remove them, or leave them out with --on-bad-image skip"
        )
    held = {folder.photos[look.index].label for look in good}
    empty = [name for label, name in enumerate(folder.classes) if label not in held]
    if empty:
        raise DataError(
            f"{folder.root}: no good photo is left in class {', '.join(map(repr, empty))} "
            f"({len(bad)} bad photos); add photos or remove the folder"
        )
    return good, bad


class _Written:
    """What lies in the partial data set, as read back from it."""

    def __init__(self, row_groups: tuple[RowGroup, ...], content_sha256: str, size: int) -> None:
        self.row_groups, self.content_sha256, self.photo_bytes = row_groups, content_sha256, size


def _write(
    spark: SparkSession,
    target: Target,
    folder: PhotoFolder,
    plan: list[list[Assignment]],
    watch: Watch,
) -> _Written:
    """Second pass: write the row groups and Petastorm's metadata, then read back and compare."""
    from petastorm.etl.dataset_metadata import materialize_dataset  # noqa: PLC0415  (slow)

    from paceline.data.ingest_schema import SCHEMA  # noqa: PLC0415  (slow)

    root, url, counter = str(folder.root), target.partial_url, watch.counter
    quiet_petastorm()
    rows = spark.sparkContext.parallelize(plan, len(plan)).flatMap(
        lambda group: counted(counter, rows_of(root, group))
    )
    with materialize_dataset(spark, url, SCHEMA, row_group_size_mb=_BLOCK_BYTES // 2**20):
        frame = spark.createDataFrame(rows, SCHEMA.as_spark_schema(), verifySchema=False)
        # Photos do not compress further.
        frame.write.option("compression", "none").parquet(url)
    return _read_back(spark, url, plan)


def _read_back(spark: SparkSession, url: str, plan: list[list[Assignment]]) -> _Written:
    """Checksums and rows of what was written. Raises DataError if anything is not as planned."""
    from pyspark.sql import functions as sql  # noqa: PLC0415

    name = sql.element_at(sql.split("path", "/"), -1).alias("file")
    files = {
        row.file: (row.length, row.sha256)
        for row in spark.read.format("binaryFile")
        .option("pathGlobFilter", "*.parquet")
        .load(url)
        .select(name, "length", sql.sha2("content", 256).alias("sha256"))
        .collect()
    }
    name = sql.element_at(sql.split(sql.input_file_name(), "/"), -1).alias("file")
    whole = (sql.sha2("image", 256) == sql.col("sha256")).alias("whole")
    size = sql.length("image").alias("size")
    rows = sorted(
        spark.read.parquet(url).select("sample_id", "label", "sha256", name, whole, size).collect()
    )
    planned = [item for group in plan for item in group]
    stored = [(row.sample_id, row.label, row.whole) for row in rows]
    if stored != [(item.sample_id, item.label, True) for item in planned]:
        raise DataError(f"{url}: read back {len(rows)} of {len(planned)} samples, or changed ones")
    groups = []
    for group in plan:
        first, last = group[0].sample_id, group[-1].sample_id
        names = {row.file for row in rows[first : last + 1]}
        if len(names) != 1 or len(files) != len(plan):
            raise DataError(f"{url}: samples {first}..{last} are not alone in one file")
        file = names.pop()
        groups.append(RowGroup(file, len(group), first, *files[file]))
    content = hashlib.sha256()
    for row in rows:
        content.update(f"{row.sample_id} {row.label} {row.sha256}\n".encode())
    return _Written(tuple(groups), content.hexdigest(), sum(row.size for row in rows))


def _manifest(
    folder: PhotoFolder,
    good: Sequence[Look],
    skipped: Sequence[SkippedPhoto],
    seed: int,
    written: _Written,
) -> DatasetManifest:
    infos = [look.info for look in good if look.info is not None]
    counts = [0] * len(folder.classes)
    for look in good:
        counts[folder.photos[look.index].label] += 1
    widths, heights = [info.width for info in infos], [info.height for info in infos]
    packages = ("paceline", "pyspark", "petastorm", "pyarrow", "pillow")
    return DatasetManifest(
        classes=tuple(printable(name) for name in folder.classes),
        class_counts=tuple(counts),
        samples=len(good),
        seed=seed,
        content_sha256=written.content_sha256,
        row_groups=written.row_groups,
        image_stats=ImageStats(
            total_bytes=written.photo_bytes,
            mean_bytes=written.photo_bytes // len(good),
            width_min=min(widths),
            width_max=max(widths),
            height_min=min(heights),
            height_max=max(heights),
            reencoded=sum(not info.verbatim for info in infos),
        ),
        skipped=tuple(skipped),
        versions={name: _version(name) for name in packages},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _version(package: str) -> str:
    from paceline import __version__  # noqa: PLC0415

    # From a job archive the package has no metadata of its own.
    return __version__ if package == "paceline" else version(package)
