"""Convert class folders of images into a Petastorm data set, through Spark.

Two passes, both in Spark tasks. First every image is decoded fully and examined. Then the good
ones are written in a seeded random order, so that row groups mix the classes, one row group per
Parquet file. The result is read back and compared before it appears under its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from paceline.base.errors import DataError, PacelineWarning, UsageError
from paceline.base.version import __version__
from paceline.collectives.message_schedules import share_bounds
from paceline.plan.spec.sentences import first_of
from paceline.train.data.images import (
    BadImage,
    ImageFolder,
    ImageInfo,
    inspect,
    normalise,
    printable,
    scan,
)
from paceline.train.data.ingest_spark import (
    NewDataset,
    counted,
    local_session,
    prepare_place,
    reported,
    spark_failures,
)
from paceline.train.data.manifest import (
    DataFile,
    DatasetManifest,
    ImageStats,
    SkippedImage,
    image_fields,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Code that runs in the Spark tasks of an ingest: examine images, then read them for storing

Row = tuple[int, int, bytearray, str, str]  # in the order of the columns of ingest.petastorm_schema


@dataclass(frozen=True, slots=True)
class ImageFinding:
    """Result of the first pass: `info` of a good image or `reason` of a bad one."""

    index: int  # in the scanned folder
    size_bytes: int
    sha256: str  # of the file
    info: ImageInfo | None
    reason: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """The sample that an image becomes."""

    sample_id: int
    label: int
    path: str  # relative to the image folder
    sha256: str  # of the file in the first pass


def examine(root: str, images: Iterable[tuple[int, str]]) -> Iterator[ImageFinding]:
    """Decode (index, path) images fully, one in memory at a time."""
    for index, path in images:
        try:
            data = _read(root, path)
        except OSError as error:
            yield ImageFinding(index, 0, "", None, f"cannot be read: {error.strerror or error}")
            continue
        digest = hashlib.sha256(data).hexdigest()
        try:
            yield ImageFinding(index, len(data), digest, inspect(data), "")
        except BadImage as error:
            yield ImageFinding(index, len(data), digest, None, str(error))


def rows_of(root: str, assignments: Iterable[Assignment]) -> Iterator[Row]:
    """Yield the rows to store, one image in memory at a time.

    Raises DataError if an image was changed after the first pass.
    """
    for item in assignments:
        data = _read(root, item.path)
        if hashlib.sha256(data).hexdigest() != item.sha256:
            raise DataError(
                f"{printable(item.path)}: the image was changed while it was ingested; run the "
                "ingest again while no other process writes to the folder"
            )
        stored, _ = normalise(data)
        digest = hashlib.sha256(stored).hexdigest()
        yield item.sample_id, item.label, bytearray(stored), digest, printable(item.path)


def _read(root: str, path: str) -> bytes:
    with open(os.path.join(root, path), "rb") as file:  # noqa: PTH118, PTH123 (any bytes in names)
        return file.read()


MIN_ROW_GROUPS = 16  # so that windows can be shuffled and ranks can divide the reading
TARGET_ROWS = 64
TARGET_BYTES = 16 * 2**20
# Beyond this number, which suffices for shuffling and for many ranks, row groups and their files
# grow: a file system opens and lists few large files faster than many small ones.
MANY_ROW_GROUPS = 256
MOST_BYTES = 64 * 2**20  # a reader keeps 16 row groups on a node
_BAD_SHOWN = 20
_EXAMINED_PER_TASK = 32
_BLOCK_BYTES = 2**30  # Parquet's row-group limit, far above MOST_BYTES: one group per file
_PETASTORM_NAME = "_common_metadata"
_PACKAGES = ("petastorm", "pyarrow", "pillow")  # whose versions the manifest states


def ingest(
    images_dir: Path,
    out_dataset: str | Path,
    *,
    on_bad_image: Literal["fail", "skip"] = "fail",
    seed: int = 0,
    spark: SparkSession | None = None,
    row_group_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetManifest:
    """Write the images of `images_dir`/CLASS/ as a Petastorm data set: all of it or nothing.

    on_bad_image: "fail" names all bad images in the error; "skip" lists them in the manifest.
    seed: of the samples' order. spark: a session whose executors can read `images_dir`; None
    starts a local one and ends it. row_group_rows: approximate images per row group; None means
    64, at most about 16 MB, and at least 16 row groups; if they were more than 256, up to about
    64 MB. progress(done, total) counts each image twice: examined, then written.
    Raises DataError for bad images or folders, UsageError if `out_dataset` is not empty.
    """
    if on_bad_image not in ("fail", "skip"):
        raise UsageError(f"on_bad_image: expected fail or skip, got {on_bad_image!r}")
    if row_group_rows is not None and row_group_rows < 1:
        raise UsageError(f"row_group_rows: expected at least 1, got {row_group_rows}")
    if seed < 0:
        raise UsageError(f"seed: expected at least 0, got {seed}")
    prepare_place(out_dataset, is_local_session=spark is None)
    folder = scan(images_dir)
    if folder.others:
        warnings.warn(_left_out(folder), PacelineWarning, stacklevel=2)
    with ExitStack() as last, ExitStack() as stack:
        if spark is None:
            spark = stack.enter_context(local_session(len(os.sched_getaffinity(0))))
        counter = stack.enter_context(reported(spark, 2 * len(folder.images), progress))
        stack.enter_context(spark_failures())
        target = NewDataset(spark, out_dataset)
        good, skipped = _judge(folder, _examine(spark, folder, counter), on_bad_image)
        plan = plan_row_groups(folder, good, seed, row_group_rows)
        # Last, because tasks of an own session write until it ends.
        last.enter_context(target.discarded_on_failure())
        _write(spark, target.partial_url, folder, plan, counter)
        manifest = _manifest(spark, target, folder, good, skipped, plan, seed)
        target.write(_PETASTORM_NAME, _petastorm_metadata(manifest.files))
        target.write_manifest(manifest.as_json())
        target.commit()
    return manifest


def _left_out(folder: ImageFolder) -> str:
    shown = first_of([printable(path) for path in folder.others], 3)
    return f"{folder.root}: left out what is no image by its suffix: {shown}"


def plan_row_groups(
    folder: ImageFolder, good: Sequence[ImageFinding], seed: int, row_group_rows: int | None
) -> list[list[Assignment]]:
    """Return the samples of each row group; group sizes differ by at most one."""
    total_bytes = sum(finding.size_bytes for finding in good)
    count = row_group_count(len(good), total_bytes, row_group_rows)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(good))
    samples = []
    for sample_id, position in enumerate(order):
        finding = good[position]
        image = folder.images[finding.index]
        samples.append(Assignment(sample_id, image.label, image.path, finding.sha256))
    bounds = [share_bounds(len(good), group, count) for group in range(count)]
    return [samples[low:high] for low, high in bounds]


def row_group_count(samples: int, total_bytes: int, row_group_rows: int | None) -> int:
    """Return the number of row groups for `samples` images of `total_bytes` in total."""
    if row_group_rows is not None:
        return -(-samples // row_group_rows)
    wanted = max(MIN_ROW_GROUPS, -(-samples // TARGET_ROWS), -(-total_bytes // TARGET_BYTES))
    largest = max(MANY_ROW_GROUPS, -(-total_bytes // MOST_BYTES))
    return min(samples, wanted, largest)


def _examine(spark: SparkSession, folder: ImageFolder, counter: Any) -> list[ImageFinding]:
    """First pass: decode every image in a task; only the findings come to the driver."""
    root = str(folder.root)
    work = [(index, image.path) for index, image in enumerate(folder.images)]
    tasks = max(1, len(work) // _EXAMINED_PER_TASK)
    findings: list[ImageFinding] = (
        spark.sparkContext.parallelize(work, tasks)
        .mapPartitions(lambda images: counted(counter, examine(root, images)))
        .collect()
    )
    if [finding.index for finding in findings] != list(range(len(work))):
        raise DataError(
            f"{root}: expected {len(work)} findings in order from Spark, got {len(findings)}"
        )
    return findings


def _judge(
    folder: ImageFolder, findings: Sequence[ImageFinding], on_bad_image: str
) -> tuple[list[ImageFinding], list[SkippedImage]]:
    good = [finding for finding in findings if finding.info is not None]
    bad = [
        SkippedImage(path=printable(folder.images[finding.index].path), reason=finding.reason)
        for finding in findings
        if finding.info is None
    ]
    if bad and on_bad_image == "fail":
        lines = [f"  {image.path}: {image.reason}" for image in bad[:_BAD_SHOWN]]
        if len(bad) > _BAD_SHOWN:
            lines.append(f"  and {len(bad) - _BAD_SHOWN} more")
        raise DataError(
            f"{folder.root}: {len(bad)} of {len(findings)} images cannot be used:\n"
            + "\n".join(lines)
            + "\nRepair or remove them, or skip them with --on-bad-image skip"
        )
    used = {folder.images[finding.index].label for finding in good}
    empty = [name for label, name in enumerate(folder.classes) if label not in used]
    if empty:
        raise DataError(
            f"{folder.root}: no good image is left in class {', '.join(map(repr, empty))} "
            f"({len(bad)} bad images); add images or remove the folder"
        )
    return good, bad


def _write(
    spark: SparkSession, url: str, folder: ImageFolder, plan: list[list[Assignment]], counter: Any
) -> None:
    """Second pass: write the row groups."""
    root = str(folder.root)
    rows = spark.sparkContext.parallelize(plan, len(plan)).flatMap(
        lambda group: counted(counter, rows_of(root, group))
    )
    frame = spark.createDataFrame(rows, petastorm_schema().as_spark_schema(), verifySchema=False)
    # JPEG and PNG do not compress further.
    writer = frame.write.option("compression", "none").option("parquet.block.size", _BLOCK_BYTES)
    writer.parquet(url)


def _petastorm_metadata(files: Sequence[DataFile]) -> bytes:
    """Return the file with which Petastorm's readers find schema and row groups.

    Petastorm's own writer needs a Python library for each store, which Spark does not.
    """
    import pyarrow as pa  # noqa: PLC0415  (slow)
    import pyarrow.parquet as pq  # noqa: PLC0415
    from petastorm.etl.dataset_metadata import (  # noqa: PLC0415
        ROW_GROUPS_PER_FILE_KEY,
        UNISCHEMA_KEY,
    )
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    schema = petastorm_schema()
    row_groups = {file.path: len(file.row_group_rows) for file in files}
    metadata = {
        UNISCHEMA_KEY: pickle.dumps(schema),
        ROW_GROUPS_PER_FILE_KEY: json.dumps(row_groups).encode(),
    }
    sink = pa.BufferOutputStream()
    pq.write_metadata(to_arrow_schema(schema.as_spark_schema()).with_metadata(metadata), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def petastorm_schema() -> Any:
    """Return the Unischema of a data set.

    Any Petastorm reader gets decoded images through the codec. Ingest itself stores encoded bytes:
    encoding through the codec would compress each image a second time.
    """
    from petastorm.codecs import CompressedImageCodec, ScalarCodec  # noqa: PLC0415  (slow)
    from petastorm.unischema import Unischema, UnischemaField  # noqa: PLC0415
    from pyspark.sql.types import IntegerType, LongType, StringType  # noqa: PLC0415

    text, jpeg = ScalarCodec(StringType()), CompressedImageCodec("jpeg", 95)
    return Unischema(
        "PacelineImages",
        [
            UnischemaField("sample_id", np.int64, (), ScalarCodec(LongType()), False),
            UnischemaField("label", np.int32, (), ScalarCodec(IntegerType()), False),
            UnischemaField("image", np.uint8, (None, None, 3), jpeg, False),
            UnischemaField("sha256", np.str_, (), text, False),
            UnischemaField("source", np.str_, (), text, False),
        ],
    )


def _read_back(
    spark: SparkSession, url: str, plan: list[list[Assignment]]
) -> tuple[tuple[DataFile, ...], str, int]:
    """Return the files, the checksum of the content and the size of all images in bytes.

    Raises DataError if the stored samples are not the planned ones.
    """
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
    intact = (sql.sha2("image", 256) == sql.col("sha256")).alias("intact")
    size = sql.length("image").alias("size")
    rows = sorted(
        spark.read.parquet(url).select("sample_id", "label", "sha256", name, intact, size).collect()
    )
    planned = [(item.sample_id, item.label, True) for group in plan for item in group]
    if [(row.sample_id, row.label, row.intact) for row in rows] != planned:
        raise DataError(f"{url}: read back {len(rows)} of {len(planned)} samples, or changed ones")
    groups = []
    for group in plan:
        first, last = group[0].sample_id, group[-1].sample_id
        names = {row.file for row in rows[first : last + 1]}
        if len(names) != 1 or len(files) != len(plan):
            raise DataError(f"{url}: expected samples {first}..{last} in a file of their own")
        size_bytes, sha256 = files[file := names.pop()]
        groups.append(
            DataFile(path=file, row_group_rows=(len(group),), size_bytes=size_bytes, sha256=sha256)
        )
    content = hashlib.sha256()
    for row in rows:
        content.update(f"{row.sample_id} {row.label} {row.sha256}\n".encode())
    return tuple(groups), content.hexdigest(), sum(row.size for row in rows)


def _manifest(
    spark: SparkSession,
    target: NewDataset,
    folder: ImageFolder,
    good: Sequence[ImageFinding],
    skipped: Sequence[SkippedImage],
    plan: list[list[Assignment]],
    seed: int,
) -> DatasetManifest:
    """Return the manifest of what was written, as read back."""

    files, content_sha256, total_bytes = _read_back(spark, target.partial_url, plan)
    infos = [finding.info for finding in good if finding.info is not None]
    counts = Counter(folder.images[finding.index].label for finding in good)
    widths, heights = [info.width for info in infos], [info.height for info in infos]
    return DatasetManifest(
        fields=image_fields(len(folder.classes)),
        id_field="sample_id",
        classes=tuple(printable(name) for name in folder.classes),
        class_counts=tuple(counts[label] for label in range(len(folder.classes))),
        samples=len(good),
        seed=seed,
        content_sha256=content_sha256,
        files=files,
        image_stats=ImageStats(
            total_bytes=total_bytes,
            mean_bytes=total_bytes // len(good),
            width_min=min(widths),
            width_max=max(widths),
            height_min=min(heights),
            height_max=max(heights),
            reencoded=sum(not info.verbatim for info in infos),
        ),
        skipped=tuple(skipped),
        # $SPARK_HOME may be another Spark than the pyspark package.
        versions={"paceline": __version__, "spark": spark.version}
        | {name: version(name) for name in _PACKAGES},
    )
