"""Where ingest writes: beside the wanted place first, renamed into it when complete."""

from __future__ import annotations

import json
import shutil
import uuid
from typing import TYPE_CHECKING, Any, Protocol, cast

from paceline.data.dataset import local_path
from paceline.data.manifest import MANIFEST_NAME
from paceline.errors import DataError, UsageError
from paceline.records.files import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession


class Target(Protocol):
    """A place for a data set that appears whole or not at all."""

    @property
    def partial_url(self) -> str:
        """Where to write to."""

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        """Put the manifest into the partial data set."""

    def commit(self) -> None:
        """Make the partial data set the wanted one."""

    def discard(self) -> None:
        """Remove the partial data set if there is one."""


def refuse_existing(name: str) -> UsageError:
    return UsageError(
        f"{name}: expected a new or empty place for the data set, but it holds something; "
        "remove it or name another"
    )


class LocalTarget:
    """A local or shared folder."""

    def __init__(self, out_dataset: str | Path) -> None:
        self._final = local_path(out_dataset)
        if self._final.exists() and (not self._final.is_dir() or any(self._final.iterdir())):
            raise refuse_existing(str(self._final))
        try:
            self._final.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self._final.parent}: cannot be made: {error.strerror}") from None
        self._partial = self._final.parent / f".{self._final.name}.partial-{uuid.uuid4().hex[:8]}"

    @property
    def partial_url(self) -> str:
        return f"file://{self._partial}"

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        for leftover in (*self._partial.glob(".*.crc"), self._partial / "_SUCCESS"):
            leftover.unlink(missing_ok=True)  # Hadoop's; the manifest has checksums of its own
        write_json(self._partial / MANIFEST_NAME, document)

    def commit(self) -> None:
        self._partial.replace(self._final)

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


class HadoopTarget:
    """Any file system that Spark's Hadoop classes know, through the driver's JVM."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        self._jvm = cast(Any, spark.sparkContext._jvm)  # noqa: SLF001  (PySpark has no file API)
        self._url = url.rstrip("/")
        self._final: Any = self._jvm.org.apache.hadoop.fs.Path(self._url)
        context: Any = spark.sparkContext._jsc  # noqa: SLF001
        self._fs: Any = self._final.getFileSystem(context.hadoopConfiguration())
        if self._fs.exists(self._final) and len(self._fs.listStatus(self._final)) > 0:
            raise refuse_existing(url)
        parent, _, name = self._url.rpartition("/")
        self._partial_url = f"{parent}/.{name}.partial-{uuid.uuid4().hex[:8]}"
        self._partial: Any = self._jvm.org.apache.hadoop.fs.Path(self._partial_url)

    @property
    def partial_url(self) -> str:
        return self._partial_url

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        path = self._jvm.org.apache.hadoop.fs.Path(self._partial, MANIFEST_NAME)
        stream = self._fs.create(path, True)
        try:
            stream.write(bytearray(json.dumps(document, indent=1).encode()))
        finally:
            stream.close()

    def commit(self) -> None:
        # Renaming onto an existing folder would move into it.
        if self._fs.exists(self._final):
            self._fs.delete(self._final, False)
        if not self._fs.rename(self._partial, self._final):
            raise DataError(f"{self._url}: the finished data set could not be renamed to this name")

    def discard(self) -> None:
        self._fs.delete(self._partial, True)


def open_target(out_dataset: str | Path, spark: SparkSession | None) -> Target:
    """The target for a path, a file:// URL or, with a session, a URL of another file system.

    Raises UsageError if something is there already.
    """
    text = str(out_dataset)
    if "://" in text and not text.startswith("file://") and spark is not None:
        return HadoopTarget(spark, text)
    return LocalTarget(out_dataset)
