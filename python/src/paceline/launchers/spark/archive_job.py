"""A small barrier job, run by spark-submit so that Java archives the classes that it loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from collections.abc import Iterable


def _task(rows: Iterable[int]) -> Iterable[int]:
    yield from rows


def main() -> None:
    """Run one barrier stage of two tasks."""
    session = SparkSession.builder.getOrCreate()
    session.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(_task).collect()
    session.stop()


if __name__ == "__main__":
    main()
