"""Destination of an ingest: written under a temporary name, renamed when complete."""

from __future__ import annotations

import json
import shutil
import uuid
from typing import TYPE_CHECKING, Any, Protocol, cast

from paceline.data.manifest import MANIFEST_NAME
from paceline.errors import DataError, UsageError
from paceline.records.files import write_json
from paceline.spec.values import local_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession


class Target(Protocol):
    """A place for a data set, which appears complete or not at all."""

    @property
    def partial_url(self) -> str:
        """URL of the temporary data set."""

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        """Write the manifest into the temporary data set."""

    def commit(self) -> None:
        """Rename the temporary data set to its final name."""

    def discard(self) -> None:
        """Remove the temporary data set if it exists."""


class LocalTarget:
    """A local or shared folder."""

    def __init__(self, out_dataset: str | Path) -> None:
        self._final = local_path(out_dataset)
        if self._final.exists() and (not self._final.is_dir() or any(self._final.iterdir())):
            raise _not_empty(str(self._final))
        try:
            self._final.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self._final.parent}: cannot be created: {error.strerror}") from None
        self._partial = self._final.parent / _partial_name(self._final.name)

    @property
    def partial_url(self) -> str:
        return f"file://{self._partial}"

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        for leftover in (*self._partial.glob(".*.crc"), self._partial / "_SUCCESS"):
            leftover.unlink(missing_ok=True)  # Hadoop's; the manifest contains checksums
        write_json(self._partial / MANIFEST_NAME, document)

    def commit(self) -> None:
        self._partial.replace(self._final)

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


class HadoopTarget:
    """Any file system that Spark's Hadoop classes know, through the driver's JVM."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        jvm = cast(Any, spark.sparkContext._jvm)  # noqa: SLF001  (PySpark has no file API)
        context: Any = spark.sparkContext._jsc  # noqa: SLF001
        self._path = jvm.org.apache.hadoop.fs.Path
        self._final = self._path(url.rstrip("/"))
        self._fs = self._final.getFileSystem(context.hadoopConfiguration())
        if self._fs.exists(self._final) and len(self._fs.listStatus(self._final)) > 0:
            raise _not_empty(url)
        parent, _, name = url.rstrip("/").rpartition("/")
        self.partial_url = f"{parent}/{_partial_name(name)}"
        self._partial = self._path(self.partial_url)

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        stream = self._fs.create(self._path(self._partial, MANIFEST_NAME), True)
        try:
            stream.write(bytearray(json.dumps(document, indent=1).encode()))
        finally:
            stream.close()

    def commit(self) -> None:
        # Renaming onto an existing folder would move the data set into it.
        if self._fs.exists(self._final):
            self._fs.delete(self._final, False)
        if not self._fs.rename(self._partial, self._final):
            raise DataError(f"{self.partial_url}: cannot be renamed to {self._final}")

    def discard(self) -> None:
        self._fs.delete(self._partial, True)


def open_target(out_dataset: str | Path, spark: SparkSession | None) -> Target:
    """Return the target for a path, a file:// URL or, with a session, another URL.

    Raises UsageError if it exists and is not empty.
    """
    text = str(out_dataset)
    if "://" not in text or text.startswith("file://"):
        return LocalTarget(out_dataset)
    if spark is None:
        raise UsageError(
            f"{text}: expected a local folder or a file:// URL; spark-jobs/ingest.py writes to the "
            "storage of a cluster"
        )
    return HadoopTarget(spark, text)


def _partial_name(name: str) -> str:
    return f".{name}.partial-{uuid.uuid4().hex[:8]}"


def _not_empty(name: str) -> UsageError:
    return UsageError(
        f"{name}: expected a new or empty place for the data set, but it is not empty; remove it "
        "or choose another"
    )
